"""`hfpaged stress`: a full pool under mixed load for a given time, and whether anything leaks, grows or goes wrong."""

from __future__ import annotations

import argparse

from hfpaged.model_arguments import add_model

SECONDS = 60.0
MAX_NUM_SEQS = 16

DESCRIPTION = """\
The thing to run before a new model goes live. A ContinuousBatcher is kept busy with long prompts, long outputs, common
prefixes, several samples, beams, requests that are refused, and aborts at random moments, so that its pool is full.
Now and then generate() runs with PagedCaches on the same pool, some of them deep copies that stay for a while. Some
requests are computed again, alone, with transformers' own DynamicCache: their tokens must be the same.

verdicts:
  clean      nothing of what follows
  wrong      tokens that are not those of the model alone
  leak       blocks that nobody gave back, or books that do not agree; with --debug the last transitions of each
  failed     requests that ended with an error, or stood still and never ended
  counters   received is not finished + aborted + refused + in flight
  growth     resident or device memory that grows with each request: its slope, and what grew
  slower     later requests take longer for each token than earlier ones
  thrash     too much is computed again after preemptions: the pool is too small for so many sequences
  unfilled   the pool was never 90 % full, so that nothing was proven
"""

EXAMPLES = """\
examples:
  hfpaged stress                                    a minute with the demo model
  hfpaged stress ./my-model --minutes 10 --kv-dtype int8 --json figures.json
  hfpaged stress ./my-model --device cuda --dtype bfloat16 --memory 20GiB --max-num-seqs 128 --minutes 30
  hfpaged stress --seconds 20 --seed 7 --plot stress.png

exit codes: 0 when clean, 1 when not, 2 for errors, 130 after Ctrl-C, which ends the load and tells the verdict so far
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its options."""
    line = "a full pool under mixed load for minutes: leak, growth, thrash, wrong tokens, or clean"
    parser = subparsers.add_parser(
        "stress", help=line, description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_model_and_pool(parser)
    _add_load(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw the pool and the memory over time")


def run(args: argparse.Namespace) -> int:
    """Load, stress, judge; torch and transformers are not imported before."""
    from hfpaged.stress import runner

    return runner.run(args)


def _add_model_and_pool(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--kv-dtype", default="auto", metavar="FORMAT", help="KV format of the pool (default: auto)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="of the pool, 2GiB say (default: 128 tokens for each sequence)"
    )
    parser.add_argument("--num-blocks", type=int, metavar="N", help="instead: blocks of the pool")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    duration = group.add_mutually_exclusive_group()
    duration.add_argument("--minutes", type=float, metavar="N", help="how long (default: 1)")
    duration.add_argument("--seconds", type=float, metavar="N", help="how long")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn by chance (default: 0)")
    group.add_argument(
        "--max-num-seqs", type=int, default=MAX_NUM_SEQS, metavar="N",
        help=f"sequences at once (default: {MAX_NUM_SEQS})",
    )  # fmt: skip
    group.add_argument("--context", type=int, metavar="N", help="tokens of the longest request (default: as the model)")
    group.add_argument("--length", metavar="N", type=int, help="of an average one (default: so that the pool is full)")
    group.add_argument(
        "--debug", action=argparse.BooleanOptionalAction, default=True,
        help="trace each block and poison freed ones (default: yes; slower, and the only way to name who leaked)",
    )  # fmt: skip
