"""`hfpaged quality`: what a quantized KV cache costs in quality, against the native one, on the same texts."""

from __future__ import annotations

import argparse

from hfpaged.errors import InvalidConfigError
from hfpaged.model_arguments import add_model
from hfpaged.quality.contexts import DEFAULT_CONTEXTS, FED, QUICK_CONTEXTS, QUICK_TEXTS, TEXTS
from hfpaged.quality.limits import parse_limits, share
from hfpaged.quality.thresholds import Thresholds

DESCRIPTION = """\
Whether a model bears a quantized KV cache. Texts are prefilled, then fed token by token (teacher forced) with the
native cache and with each quantized one, so that every format reads only what its own cache gives back. Compared are
the distributions of the next token at each position, and greedy generations.

figures:
  perplexity    of the text, and its change with the standard error of that change (paired, by token)
  KL            divergence of the next-token distributions, native || quantized, in nats: mean and 99th percentile
  top-1         how often the likeliest next token is the same
  parts at      the first new token in which any greedy generation differs from the native one
  ROUGE-L       of these generations, over tokens (Lin 2004)
  bytes/token   of the pool, scales included, against native and against bfloat16
"""

EXAMPLES = """\
examples:
  hfpaged quality                                           int8 on the demo model
  hfpaged quality ./my-model --kv int8 --against fp8_e4m3,int4 --json figures.json --plot kl.png
  hfpaged quality ./my-model --kv int4 --data own.txt --contexts short,1k,4k,max --layers
  hfpaged quality ./my-model --kv '{"default": "int8", "layers": {"0": "auto"}}'
  hfpaged quality ./my-model --fail-over ppl=0.5%,top1=98% --quick --json -       a gate for CI
  hfpaged quality ./my-model --calibrate scales.safetensors --data own.txt
  hfpaged quality ./my-model --kv fp8_e4m3 --against fp8_e4m3 --kv-scales scales.safetensors

exit codes: 0 when all formats are fit, 3 when one is not (the last line says which figure broke which limit by how
much, and "failures" of --json says it to machines), 2 for errors
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its options."""
    line = "what a quantized KV cache costs in quality, and whether the model bears it"
    parser = subparsers.add_parser(
        "quality", help=line, description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_options(parser)
    _add_thresholds(parser)


def run(args: argparse.Namespace) -> int:
    """Judge, or calibrate; torch and transformers are not imported before."""
    from hfpaged.quality import runner

    return runner.run(args)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--kv", metavar="FORMAT", help="the KV format to judge (default: int8), or a JSON object")
    parser.add_argument("--against", metavar="FORMAT,...", help="more KV formats, on the same texts")
    parser.add_argument("--data", metavar="FILE", help="UTF-8 text (default: own English and code that is built in)")
    parser.add_argument(
        "--contexts", metavar="LENGTH,...",
        help=f"short (128 tokens, all but the first fed one by one), 1k, 4k, max or a number (the last {FED} of each "
        f"fed one by one); default: {DEFAULT_CONTEXTS}",
    )  # fmt: skip
    parser.add_argument("--texts", type=int, metavar="N", help=f"for each length (default: {TEXTS})")
    parser.add_argument(
        "--quick", action="store_true",
        help=f"for CI: --contexts {QUICK_CONTEXTS} --texts {QUICK_TEXTS} where these are not given; standard errors "
        "are larger",
    )  # fmt: skip
    parser.add_argument("--layers", action="store_true", help="also rank layers and heads by what --kv does to them")
    parser.add_argument("--calibrate", metavar="FILE", help="judge nothing; write static scales of fp8 (--kv)")
    parser.add_argument("--kv-scales", metavar="FILE", help="judge --kv with the static scales of this file")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw KL by position (pip install 'hfpaged[plot]')")


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "thresholds",
        "a format is fit when it keeps all of them at every length. Figures count as measured: where a miss is within "
        "the standard error, the last line says so",
    )
    group.add_argument(
        "--max-ppl-change", type=share, metavar="X%",
        help="highest rise of perplexity (default: 1%%, as MLPerf asks of quantized models 99%% of their quality)",
    )  # fmt: skip
    group.add_argument(
        "--max-kl", type=float, metavar="NATS",
        help="highest mean KL divergence (default: 0.02, which by Pinsker's inequality moves less than a tenth of the "
        "probability from token to token)",
    )  # fmt: skip
    group.add_argument(
        "--min-top1", type=share, metavar="X%",
        help="lowest top-1 agreement (default: 93%%; what falls out are close calls as long as KL is low)",
    )  # fmt: skip
    group.add_argument(
        "--fail-over", type=parse_limits, metavar="NAME=LIMIT,...",
        help="instead, these limits and no others: ppl=0.5%% (perplexity's rise, at most), top1=98%% (agreement, at "
        "least), kl=0.01 (nats, at most), rouge=90%% (ROUGE-L of the generations, at least)",
    )  # fmt: skip


def thresholds_of(args: argparse.Namespace) -> Thresholds:
    """Those that are asked for. Raises InvalidConfigError where they are asked for in both ways."""
    names = ("max_ppl_change", "max_kl", "min_top1")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.fail_over is None:
        return Thresholds(**given)
    if given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise InvalidConfigError(f"--fail-over holds all limits, and {flag} is one more; write all of them into one")
    return Thresholds.only(args.fail_over)
