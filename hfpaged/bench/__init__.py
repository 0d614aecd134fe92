"""`hfpaged bench`: speed and KV memory against plain transformers. Each kind of benchmark is a subcommand."""

from __future__ import annotations

import argparse

from hfpaged.bench.batch_rows import BATCH_ROWS
from hfpaged.bench.catalog import PREFIX_ROWS, ROWS, Row
from hfpaged.bench.quant_rows import QUANT_ROWS
from hfpaged.bench.serve_rows import RATE, SERVE_ROWS

DTYPES = ("float32", "bfloat16", "float16")

EXAMPLES = """\
examples:
  hfpaged bench generate --quick                          does it run, and are the tokens the same?
  hfpaged bench generate --model ./my-model --device cuda --dtype bfloat16
  hfpaged bench generate --only decode-long,beam-memory --json figures.json
  hfpaged bench prefix                                    what is it worth that prompts begin alike?
  hfpaged bench quant --only int8-decode,int8-hqq         what does a quantized KV cache cost or gain in speed?
  hfpaged bench batch --only static --threads 2           32 requests at once, against batches of fixed size
  hfpaged bench serve --only http,loop --threads 2        what does HTTP cost?
  hfpaged bench serve --against http://localhost:9000     another server that you have started, instead of transformers'

exit codes: 0, 1 when tokens differ, 3 with --strict when a target is missed
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its kinds."""
    line = "measure speed and KV memory against plain transformers"
    parser = subparsers.add_parser("bench", help=line, description=line)
    kinds = parser.add_subparsers(metavar="KIND", dest="kind", required=True)
    _add_kind(kinds, "generate", "model.generate() with DynamicCache and with PagedCache, side by side", ROWS)
    _add_kind(kinds, "prefix", "prompts that begin alike, with and without sharing, side by side", PREFIX_ROWS)
    line = "quantized PagedCaches, the native one and transformers' QuantizedCache, side by side"
    _add_kind(kinds, "quant", line, QUANT_ROWS)
    _add_kind(kinds, "batch", "many requests at once: ContinuousBatcher and transformers, side by side", BATCH_ROWS)
    line = "the server: over the batcher in process, and beside transformers serve or another one"
    serve = _add_kind(kinds, "serve", line, SERVE_ROWS, where="")
    serve.add_argument("--against", metavar="URL", help="a server with the same model, instead of transformers serve")
    serve.add_argument(
        "--rate", type=float, default=RATE, metavar="N", help=f"requests per second of the load (default: {RATE:g})"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen kind; torch and transformers are not imported before."""
    from hfpaged.bench import runner

    return runner.run(args)


def _add_kind(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser], name: str, line: str, rows: tuple[Row, ...],
    where: str = " in one process",
) -> argparse.ArgumentParser:  # fmt: skip
    line += where
    width = max(13, *(len(row.name) for row in rows))
    lines = "\n".join(f"  {row.name:{width}} {row.describe()}, {row.goal}" for row in rows)
    kind = kinds.add_parser(
        name, help=line, description=f"{line}\n\nrows:\n{lines}", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    kind.set_defaults(rows=rows, against=None, rate=RATE)
    _add_options(kind)
    return kind


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--device", default="cpu", help="where torch runs the model (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as torch chooses)")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each side (default: 3, with --quick 1)")
    parser.add_argument("--only", metavar="ROW,...", help="measure these rows alone")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; nothing is judged")
    parser.add_argument("--strict", action="store_true", help="exit with 3 when a target is missed")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
