"""The flags of `hfpaged plan`, each also under the name that `hfpaged serve` and vLLM have for it."""

from __future__ import annotations

import argparse

from hfpaged.config import DEFAULT_STORE_SIZE, parse_bytes
from hfpaged.errors import InvalidConfigError
from hfpaged.serve import flag_types as types

KV_FORMATS = ("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2", "k8v4", "int4")
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("int8", "fp8", "int4")


def size_or_none(text: str) -> int:
    """Bytes; 0 is allowed."""
    if text.strip() in ("0", "0B"):
        return 0
    try:
        return parse_bytes(text)
    except InvalidConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 0, bytes, or 2GiB or 512MB") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare those of a plan itself."""
    _machine(parser.add_argument_group("machine"))
    _workload(parser.add_argument_group("workload"))
    _choices(parser.add_argument_group("choices"))
    _several(parser.add_argument_group("more than one device, and tiers below the pool"))
    _output(parser.add_argument_group("output").add_mutually_exclusive_group())


def _machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", default="detect", metavar="CARD|SIZE",
        help="a card (h100, A100-80GB, rtx4090), a size (80GiB, 80GB), cpu for this machine's memory, or detect "
             "(default: detect, the GPU that is here, else cpu)")  # fmt: skip
    add("--utilization", "--gpu-memory-utilization", type=types.share, metavar="SHARE",
        help="share of the device for weights, activations and the pool (default: 0.85, on a CPU 0.5)")  # fmt: skip
    add("--overhead", type=size_or_none, default=1 << 30, metavar="SIZE",
        help="what the process takes besides (default: 1GiB)")  # fmt: skip
    add("--weights", type=size_or_none, metavar="SIZE",
        help="of the whole model (default: by the files beside the config, else counted from it)")  # fmt: skip
    add("--activations", type=size_or_none, metavar="SIZE",
        help="of a step (default: estimated for the token budget)")  # fmt: skip
    add("--kv-cache-memory", type=types.size, metavar="SIZE",
        help="of the pool, where it is known: device and weights do not matter then")  # fmt: skip


def _workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--context", "--max-model-len", type=types.count, metavar="N",
        help="longest prompt with its answer (default: --prompt + --output, else what the model takes, at most "
             "8192)")  # fmt: skip
    add("--prompt", type=types.count_or_none, metavar="N",
        help="tokens of a usual prompt (default: what --context leaves)")  # fmt: skip
    add("--output", type=types.count_or_none, metavar="N",
        help="tokens of a usual answer (default: what --context leaves)")  # fmt: skip
    add("--concurrency", "--sequences", "--max-num-seqs", "-n", type=types.count, metavar="N",
        help="requests at once (default: as many as fit)")  # fmt: skip
    add("--shared-prefix", type=types.count_or_none, default=0, metavar="N",
        help="tokens with which all prompts begin, stored once (default: 0)")  # fmt: skip
    add("--encoder-tokens", type=types.count_or_none, metavar="N",
        help="what an encoder reads of a request, in models with one (default: the prompt; of Whisper 30 seconds, of "
             "Mllama one picture)")  # fmt: skip


def _choices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kv-dtype", "--kv-cache-dtype", choices=KV_FORMATS, default="auto",
        help="how keys and values are stored (default: auto, as computed)")  # fmt: skip
    add("--dtype", choices=("auto", *DTYPES), default="auto",
        help="of weights and activations (default: auto, that of the checkpoint)")  # fmt: skip
    add("--weights-dtype", "--quantization", choices=WEIGHTS,
        help="weights quantized so (default: as in the checkpoint)")  # fmt: skip
    add("--block-size", type=types.block_size, default=16, metavar="N",
        help="tokens of a block (default: 16)")  # fmt: skip
    add("--window", type=types.count, metavar="N",
        help="keep the last N tokens only, as PagedCache(model, window=N) does (default: keep all)")  # fmt: skip
    add("--token-budget", "--max-num-batched-tokens", type=types.count, default=4096, metavar="N",
        help="the most tokens of one step (default: 4096)")  # fmt: skip


def _several(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tp", "--tensor-parallel-size", type=types.count, default=1, metavar="N",
        help="devices that share the model, each with its part of the weights, as transformers' tp_plan splits them, "
             "and its own KV heads where they divide; all sizes are those of one (default: 1)")  # fmt: skip
    add("--replicas", type=types.count, default=1, metavar="N",
        help="devices (or groups of --tp) with a whole model and a pool each; --concurrency is that of all together "
             "(default: 1)")  # fmt: skip
    add("--swap-space", type=size_or_none, default=0, metavar="SIZE",
        help="host memory of each process for prefixes that the pool evicts and requests that it preempts "
             "(default: 0)")  # fmt: skip
    add(
        "--prefix-store",
        metavar="DIR",
        help="a directory where services on this machine leave prefixes for each other (default: none)",
    )
    add(
        "--prefix-store-size",
        type=types.size,
        metavar="SIZE",
        help=f"what the files there may take (default: {DEFAULT_STORE_SIZE} with --prefix-store)",
    )


def _output(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument("--json", action="store_true", help="print the plan as JSON")
    group.add_argument(
        "--for", dest="target", choices=("serve",),
        help="print the command line of `hfpaged serve` with the recommended flags, and nothing else on stdout",
    )  # fmt: skip
