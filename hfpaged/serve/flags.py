"""The flags of `hfpaged serve`, named as people know them from vLLM where they mean the same; each with the reason for
its default.
"""

from __future__ import annotations

import argparse

from hfpaged.config import DEFAULT_STORE_SIZE
from hfpaged.model_arguments import TRUST
from hfpaged.replicas import flags as replica_flags
from hfpaged.serve import flag_types as types
from hfpaged.serve import kv_event_flags, tp_flags
from hfpaged.serve.flag_types import add_flag as _add
from hfpaged.serve.options import ServeOptions

_OPTIONS = ServeOptions()  # its defaults
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_FORMATS = ("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2", "k8v4", "int4")
LEVELS = ("debug", "info", "warning", "error")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare all of them, by what they are about."""
    for title, declare in (
        ("address and keys", _address),
        ("model", _model),
        ("KV memory", _memory),
        ("steps and queue", _scheduling),
        ("limits of a request, and the end", _limits),
        ("metrics, traces, logs", _telemetry),
        ("block events for routers", kv_event_flags.add_flags),
    ):
        declare(parser.add_argument_group(title))
    replica_flags.add_flags(parser)


def _address(group: argparse._ArgumentGroup) -> None:
    _add(group, "--host",
         "address to listen on",
         "127.0.0.1: other machines are let in only when you say so",
         default="127.0.0.1")  # fmt: skip
    _add(group, "--port",
         "port to listen on; 0 takes a free one",
         "8000, as vLLM's: clients' examples work unchanged",
         type=types.port, default=8000)  # fmt: skip
    _add(group, "--api-key",
         "a key that is let in, each a tenant with prefixes and a queue share of its own; may come several times, and "
         "HFPAGED_API_KEY holds more of them with commas between",
         "none: everybody is let in, which is fine on 127.0.0.1 only",
         metavar="[TENANT=]KEY", action="append", default=[])  # fmt: skip
    _add(group, "--api-key-file",
         "such keys one a line, # begins a comment",
         "none: but `ps` shows the flags of a process to all, and not what its files hold",
         metavar="FILE")  # fmt: skip


def _model(group: argparse._ArgumentGroup) -> None:
    _add(group, "--served-model-name",
         "the name that requests use, the first of several in answers",
         "the model's own: what a client asks for is what there is",
         nargs="+", action="extend", default=[], metavar="NAME")  # fmt: skip
    _add(group, "--dtype",
         "of weights and activations",
         "auto: that of the checkpoint, since no other is as its makers tested it",
         choices=DTYPES, default="auto")  # fmt: skip
    _add(group, "--device",
         "where torch runs the model",
         "cuda where there is one, else cpu: what is fastest here")  # fmt: skip
    _add(group, "--trust-remote-code", *TRUST, action="store_true")
    _add(group, "--max-model-len",
         "longest prompt with its answer, in tokens",
         "what the model's config says: longer texts are not what it was trained on",
         type=types.count, metavar="N")  # fmt: skip
    _add(group, "--adapter",
         "a PEFT adapter, chosen by requests with this model name; may come several times",
         "none: the model alone",
         type=types.named_path, action="append", default=[], metavar="NAME=PATH")  # fmt: skip

    tp_flags.add_flags(group)


def _memory(group: argparse._ArgumentGroup) -> None:
    _add(group, "--kv-cache-dtype",
         "how keys and values are stored",
         "auto: as the model computes them, so that tokens are the same; `hfpaged quality` tells what another one "
         "costs",
         choices=KV_FORMATS, default="auto")  # fmt: skip
    _add(group, "--block-size",
         "tokens of a block, a power of two",
         "16: larger ones share fewer prefixes and leave more of their last block empty, smaller ones make longer "
         "tables",
         type=types.block_size, default=16)  # fmt: skip
    _add(group, "--gpu-memory-utilization",
         "share of the device for weights, activations and the pool; of a machine's memory on a CPU",
         "0.85 on a GPU, where 15 % is left to fragments and others; 0.5 on a CPU, whose memory others live in",
         type=types.share, metavar="SHARE")  # fmt: skip
    _add(group, "--kv-cache-memory",
         "bytes of the pool alone, such as 2GiB, instead of the share",
         "none: the share uses what there is",
         type=types.size, metavar="BYTES")  # fmt: skip
    _add(group, "--enable-prefix-caching",
         "find known prefixes again, and let others find what is computed",
         "on: it costs next to nothing where nothing is shared",
         action=argparse.BooleanOptionalAction, default=True)  # fmt: skip
    _add(group, "--swap-space",
         "host memory, such as 4GiB, to which evicted prefixes and preempted requests go, and from which they come "
         "back when that is faster than computing them, as measured",
         "0, none: where the pool holds what comes again, it is only memory and copies",
         type=types.size_or_none, default=0, metavar="BYTES")  # fmt: skip
    _add(group, "--prefix-store",
         "a directory for prefixes that this service and others on this machine compute with the same model: each "
         "begins with what the others have written, also after a restart",
         "none: prefixes are gone with the process. Token ids stand there in clear, readable by this user alone",
         type=types.folder, metavar="DIR")  # fmt: skip
    _add(group, "--prefix-store-size",
         "what the files there may take; the least recently used ones make room",
         f"{DEFAULT_STORE_SIZE}: 80,000 tokens of a model like Llama 3.1 8B",
         type=types.size, default=types.size(DEFAULT_STORE_SIZE), metavar="BYTES")  # fmt: skip
    group.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_false",
                       help="the same as --no-enable-prefix-caching")  # fmt: skip
    _add(group, "--window",
         "keep the last N tokens of an endless text; refused, since the engine keeps all tokens of a request until its"
         " end",
         "none: nothing is forgotten",
         type=types.count, metavar="N")  # fmt: skip
    _add(group, "--sinks",
         "with --window, the first N tokens to keep; refused as well",
         "none: see --window",
         type=types.count_or_none, metavar="N")  # fmt: skip


def _scheduling(group: argparse._ArgumentGroup) -> None:
    _add(group, "--max-num-seqs",
         "the most sequences in one step",
         "128: beyond it each waits longer for its next token than the batch gains",
         type=types.count, default=128, metavar="N")  # fmt: skip
    _add(group, "--max-num-batched-tokens",
         "the most tokens in one step",
         "4096: what keeps a GPU busy; more makes those who stream wait for others' prompts",
         type=types.count, default=4096, metavar="N")  # fmt: skip
    _add(group, "--max-num-queued-requests",
         "beyond those that run, so many may wait; others get 429 at once",
         "1024: a queue that never refuses hides an overload until clients give up",
         type=types.count_or_none, default=1024, metavar="N")  # fmt: skip
    _add(group, "--scheduling-policy",
         "who is next: in order of arrival, or first by the `priority` of requests, the smaller the sooner",
         "fcfs: a client could put itself before all others",
         choices=("fcfs", "priority"), default="fcfs")  # fmt: skip


def _limits(group: argparse._ArgumentGroup) -> None:
    _add(group, "--request-timeout",
         "seconds that a request may take, those in the queue included",
         "none: only its client knows how long an answer may take",
         type=types.seconds, metavar="SECONDS")  # fmt: skip
    _add(group, "--send-timeout",
         "seconds that a client may leave a stream unread, or take to send its request",
         "30: longer than any pause of a network that comes back",
         type=types.seconds, default=_OPTIONS.send_timeout, metavar="SECONDS")  # fmt: skip
    _add(group, "--max-request-bytes",
         "of the body of a request, such as 4MiB",
         "512KiB, or 8 bytes for each token of the context: parsed within the 50 ms that others' streams may stand "
         "still",
         type=types.size, metavar="BYTES")  # fmt: skip
    _add(group, "--shutdown-timeout",
         "seconds that requests get to end after SIGTERM or Ctrl-C",
         "25: Kubernetes kills after 30",
         type=types.seconds_or_none, default=_OPTIONS.shutdown_timeout, metavar="SECONDS")  # fmt: skip


def _telemetry(group: argparse._ArgumentGroup) -> None:
    _add(group, "--metrics-compat",
         "metrics under these names besides",
         "none: each name costs a series; dashboards made for vLLM want them",
         choices=("vllm",))  # fmt: skip
    _add(group, "--shadow",
         "share of requests, such as 1%, that are computed once more with the native KV cache when they have ended: "
         "metrics then tell what --kv-cache-dtype costs in your traffic (KL, top-1 agreement)",
         "none: it takes idle time, and up to 2 % of the engine's time under load",
         type=types.sample, default=0.0, metavar="SHARE")  # fmt: skip
    _add(group, "--otlp-endpoint",
         "where spans and metrics go, as OTEL_EXPORTER_OTLP_ENDPOINT says",
         "what the OTEL_* variables say: they know more than a flag can",
         type=types.origin, metavar="URL")  # fmt: skip
    _add(group, "--record-prompts",
         "put texts of prompts and answers into spans",
         "off: they are somebody's words",
         action="store_true")  # fmt: skip
    _add(group, "--record",
         "append a trace for `hfpaged plan --replay`: when requests came, their lengths and which begin alike, without "
         "any text",
         "off: a file that only grows, and says how much who asks",
         metavar="FILE")  # fmt: skip
    _add(group, "--log-level",
         "least level that is logged",
         "info: a line for each request",
         choices=LEVELS, default="info")  # fmt: skip
    _add(group, "--log-json",
         "log JSON, one object a line",
         "off: people read lines, collectors read JSON",
         action="store_true")  # fmt: skip
