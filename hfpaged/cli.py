"""The command line: finds the subcommand, imports that one alone, and turns errors into one line."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from hfpaged.errors import HfpagedError
from hfpaged.telemetry import providers

# One module each, with add_parser(subparsers) and run(args) -> int. The lines are repeated here so that
# `hfpaged --help` imports none of them: torch and transformers alone take seconds.
COMMANDS = {
    "demo": "chat with a small model, with and without paged KV memory, and compare",
    "serve": "an OpenAI-compatible server around a model, with metrics and a live page",
    "plan": "what fits on a card, what is short, and the cheapest ways out, from a config alone",
    "support": "whether a model works with PagedCache, how fast, and why",
    "bench": "measure speed and KV memory against plain transformers",
    "stress": "a full pool under mixed load for minutes: leak, growth, thrash, wrong tokens, or clean",
    "quality": "what a quantized KV cache costs in quality, and whether the model bears it",
    "telemetry": "a Grafana dashboard, Prometheus alerts and a Jaeger setup, to be written out",
    "doctor": "what is wrong with a running engine, by its metrics",
}

# Where a command is at home that has not the package of its name to itself.
_HOME_OF = {"serve": "hfpaged.serve.command", "plan": "hfpaged.planner.command"}

# Those that run a model: with OTEL_* variables set their requests are traced and measured.
OBSERVED = ("demo", "bench", "stress", "quality")

EXAMPLES = """\
examples:
  hfpaged demo                                   a small model, fetched on the first run
  hfpaged demo --model ./my-model --device cuda  your own model
  hfpaged serve ./my-model                       an OpenAI-compatible server, on port 8000
  hfpaged plan ./my-model --device h100          what fits on a card, from its config alone
  hfpaged support gemma3_text                    whether a model works, from its config alone
  hfpaged bench --help                           what can be measured
  hfpaged stress ./my-model --minutes 10         whether it leaks, grows or goes wrong under load
  hfpaged quality ./my-model --kv int8           whether it bears a quantized KV cache
  hfpaged telemetry export monitoring            what Grafana, Prometheus and Jaeger need
  hfpaged doctor http://localhost:9464           what is wrong with what runs there
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = [_with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        args = build_parser(words).parse_args(words)
        with _observed(words):
            code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads this, `head` say, has read enough
        _drop_output()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        where = f" for {error.filename}" if error.filename else ""
        print(f"hfpaged: error: the disk is full{where}; make room and run it again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hfpaged: interrupted", file=sys.stderr)
        return 130
    except HfpagedError as error:
        print(f"hfpaged: error: {error}", file=sys.stderr)
        return 2
    return code


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser for one command line: complete for the command in `words`, a help line for the others."""
    parser: argparse.ArgumentParser = _Parser(
        prog="hfpaged",
        description="PagedAttention for the model that you already have in transformers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("hfpaged")
    parser.add_argument("--version", action="version", version=f"hfpaged {version}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = _chosen(words)
    for name, line in COMMANDS.items():
        if name == chosen:
            _add_command(subparsers, name)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def _drop_output() -> None:
    """What is left in the buffer of stdout goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and not all that could have been."""

    def parse_known_args(  # type: ignore[override]  # of the overloads only that one is used here
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """A command refuses the flags that it does not know itself: argparse leaves that to the whole, which knows no
        flag of a command.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def _meant(self, unknown: list[str]) -> str:
        for word in unknown:
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1) if flag.startswith("--") else []
            if near:
                return f" (did you mean {near[0]}?)"
        return ""


def _with_dashes(word: str) -> str:
    """A flag that was written with underscores, as some do: --max_num_seqs=4."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _chosen(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _observed(words: Sequence[str]) -> AbstractContextManager[None]:
    return providers.observed() if _chosen(words) in OBSERVED else nullcontext()


def _add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    module = importlib.import_module(_HOME_OF.get(name, f"hfpaged.{name}"))
    module.add_parser(subparsers)
    subparsers.choices[name].set_defaults(run=module.run)
