"""`hfpaged serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

import argparse
import logging
import os

from hfpaged import replicas
from hfpaged.errors import HfpagedError, InvalidConfigError
from hfpaged.replicas import flags as replica_flags
from hfpaged.serve import flag_types, kv_event_flags, tp_flags
from hfpaged.serve.flags import add_flags
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.serve.options import ServeOptions

logger = logging.getLogger("hfpaged")

LINE = "an OpenAI-compatible server around a model, with metrics and a live page"

EPILOG = """\
examples:
  hfpaged serve                                        the demo model on http://127.0.0.1:8000
  hfpaged serve ./my-model --kv-cache-memory 2GiB      your own, with a pool of this size
  hfpaged serve org/model --host 0.0.0.0 --api-key-file keys.txt --log-json
  hfpaged serve ./my-model --kv-cache-dtype int8 --shadow 1%
                                                       what int8 costs in your traffic, as metrics
  torchrun --nproc-per-node 2 -m hfpaged.serve org/model --tp
                                                       one model over two GPUs
  hfpaged serve org/model --replicas 2                 two replicas on this machine, a GPU each (needs Ray)
  hfpaged serve org/model --address auto --max-replicas 8
                                                       on a Ray cluster, as many as the load asks for
  hfpaged serve ./my-model --kv-events-endpoint 'tcp://127.0.0.1:5557' --kv-events-topic kv@pod@model
                                                       a router outside follows which prefixes are here
  curl http://127.0.0.1:8000/v1/models

Flags may be written with _ instead of -. SIGTERM or Ctrl-C lets running requests end; a second one does not.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "serve", help=LINE, description=LINE, epilog=EPILOG, usage="hfpaged serve [MODEL] [--FLAG VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub id (default: the demo model, SmolLM2-135M-Instruct)"
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises HfpagedError for what cannot be served, with --log-json logs it."""
    if not args.log_json:
        return _run(args)
    import torch  # noqa: F401  # whose loggers have handlers from here on; what is imported behind it may warn

    with logging_to_stderr(args.log_level, as_json=True):
        try:
            return _run(args)
        except HfpagedError as error:
            logger.error("%s", error)
            return 2


def _run(args: argparse.Namespace) -> int:
    options = options_of(args)
    sizes = sizes_of(args)
    num_ranks = tp_flags.size_of(args)
    if replica_flags.are_wanted(args):
        tp_flags.check_alone(num_ranks)
        kv_event_flags.check_single(options.kv_events)
        return replicas.run(args, options, sizes)
    if args.otlp_endpoint is not None:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = args.otlp_endpoint
    from hfpaged import serve

    code: int = serve.run(
        args.model, host=args.host, port=args.port, options=options, dtype=args.dtype, device=args.device,
        log_level=args.log_level, log_json=args.log_json, split=num_ranks > 1,
        trust_remote_code=args.trust_remote_code, **sizes,
    )  # fmt: skip
    return code


def options_of(args: argparse.Namespace) -> ServeOptions:
    """What the server is told. Raises InvalidConfigError."""
    swallowed = [name for name in args.served_model_name[1:] if args.model is None and os.path.isdir(name)]
    if swallowed:
        raise InvalidConfigError(
            f"--served-model-name takes all words behind it, {swallowed[0]} too, which is a folder; put the model "
            f"first: hfpaged serve {swallowed[0]} --served-model-name NAME"
        )
    return ServeOptions(
        api_keys=flag_types.api_keys(args.api_key, args.api_key_file, os.environ.get("HFPAGED_API_KEY")),
        served_model_names=tuple(args.served_model_name),
        adapters=flag_types.adapters(args.adapter),
        request_timeout=args.request_timeout,
        send_timeout=args.send_timeout,
        shutdown_timeout=args.shutdown_timeout,
        max_body_bytes=args.max_request_bytes,
        metrics_compat=args.metrics_compat,
        record_prompts=args.record_prompts,
        record=args.record,
        kv_events=kv_event_flags.config_of(args),
    )


def sizes_of(args: argparse.Namespace) -> dict[str, object]:
    """What ContinuousBatcher is told. Raises InvalidConfigError."""
    if args.window is not None or args.sinks is not None:
        raise InvalidConfigError(
            "--window and --sinks are for one endless text, and the engine of a server keeps all tokens of a request "
            "until it ends; use generate(past_key_values=PagedCache(model, window=...)), or --max-model-len here"
        )
    if args.shadow and args.kv_cache_dtype == "auto":
        raise InvalidConfigError(
            f"--shadow {args.shadow:g} compares a quantized KV cache with the native one, and --kv-cache-dtype auto is "
            "the native one: there is nothing to compare; give --kv-cache-dtype int8, or leave --shadow out"
        )
    return {
        "memory": args.gpu_memory_utilization if args.kv_cache_memory is None else args.kv_cache_memory,
        "block_size": args.block_size,
        "kv_dtype": args.kv_cache_dtype,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "prefix_sharing": args.enable_prefix_caching,
        "max_num_queued_requests": args.max_num_queued_requests,
        "policy": args.scheduling_policy,
        "shadow": args.shadow,
        "swap_space": args.swap_space,
        "prefix_store": args.prefix_store,
        "prefix_store_size": args.prefix_store_size,
    }
