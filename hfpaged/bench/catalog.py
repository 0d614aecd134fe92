"""The rows of the benchmark: names, sizes and targets. Free of torch, so that help and errors are quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hfpaged.bench.shape import Shape
from hfpaged.bench.target import Target
from hfpaged.errors import InvalidConfigError

if TYPE_CHECKING:
    from hfpaged.bench.result import Measured
    from hfpaged.bench.setting import Setting


@dataclass(frozen=True)
class Row:
    """One line of the table. `module` has the function measure(setting, shape), or one named behind a colon; `what`
    speaks of a shape's numbers. A row without a target is there for information; `wants_less` says of it what a target
    would. `takes_server` is true where --against puts another server in the place of transformers' own, and
    `needs_server` where there is no row without one.
    """

    name: str
    what: str
    module: str
    shape: Shape
    target: Target | None
    wants_less: bool = False
    takes_server: bool = False
    needs_server: bool = False

    def describe(self, shape: Shape | None = None) -> str:
        """What is measured, in the row's own shape or the one that was run."""
        return self.what.format(**asdict(shape or self.shape))

    def load(self) -> Callable[[Setting, Shape], Measured]:
        """The function that measures this row."""
        module, _, function = self.module.partition(":")
        measure: Callable[[Setting, Shape], Measured]
        measure = getattr(importlib.import_module(f"hfpaged.bench.{module}"), function or "measure")
        return measure

    @property
    def goal(self) -> str:
        """The target in words."""
        return "for information" if self.target is None else f"target {self.target}"

    @property
    def is_more_better(self) -> bool:
        """Whether a greater value is the better one."""
        return not self.wants_less if self.target is None else self.target.least is not None

    def format(self, value: float) -> str:
        """`value` as the target counts."""
        return (self.target or Target()).format(value)


DECODE = "decode speed, batch {batch}, prompt {prompt}"

ROWS = (
    Row("tokens", "equal rows, greedy and 4 beams", "tokens", Shape(16, 512, 32), Target(1, is_share=True)),
    Row("decode-short", DECODE, "decode", Shape(1, 512, 128), Target(1.0)),
    Row("decode-long", DECODE, "decode", Shape(1, 6000, 64), Target(1.6)),
    Row("decode-batch", DECODE, "decode", Shape(16, 1024, 64), Target(1.4)),
    Row("prefill", "prefill speed, prompt {prompt}", "prefill", Shape(1, 2048, 1), Target(0.95)),
    Row(
        "beam-memory", "peak KV bytes, 4 beams, prompt {prompt}", "beam_memory", Shape(1, 512, 64),
        Target(most=0.45, is_share=True),
    ),
    Row("waste", "unfilled part of used blocks", "waste", Shape(8, 1024, 32), Target(below=0.04, is_share=True)),
    Row(
        "bandwidth", "decode attention, bytes/s of torch.sum's", "bandwidth", Shape(32, 512, 0),
        Target(0.6, is_share=True),
    ),
    Row("python", "Python's part of a step", "python_time", Shape(1, 512, 64), Target(below=0.05, is_share=True)),
    Row(
        "http-decode", "decode speed of one stream over HTTP, prompt {prompt}, over --against", "against:decode",
        Shape(1, 512, 128), None, needs_server=True,
    ),
)  # fmt: skip

SHARED = Shape(32, 1000, 32, own=64)

PREFIX_ROWS = (
    Row(
        "prefill-batch", "prompt positions computed, {batch} rows, {prompt} tokens in common", "prefix_batch:prefill",
        SHARED, Target(most=0.1, is_share=True),
    ),
    Row(
        "prefill-stream", "the same, one request after the other", "prefix_stream", Shape(32, 1000, 8, own=64),
        Target(most=0.1, is_share=True),
    ),
    Row("memory", "peak KV bytes of that batch", "prefix_batch:memory", SHARED, Target(most=0.2, is_share=True)),
    Row(
        "first-token", "time to the first token, warm prefix of {prompt}, {own} own", "prefix_first_token",
        Shape(1, 1000, 1, own=48), Target(most=0.125, is_share=True),
    ),
    Row(
        "swapped", "time to the first token, prompt {prompt} back from swap space, or computed", "prefix_swapped",
        Shape(1, 1000, 1), None, wants_less=True,
    ),
    Row(
        "no-match", "cost of sharing where nothing matches, prompt {prompt}, {new} new", "prefix_cost",
        Shape(1, 512, 64), Target(below=0.01, is_share=True),
    ),
    Row(
        "attention", "decode attention, {batch} rows, common blocks read once", "prefix_attention",
        Shape(32, 1000, 0, own=48), Target(3.0),
    ),
    Row("decode", "decode speed of that batch, {new} new", "prefix_batch:decode", SHARED, None),
    Row(
        "http-first-token", "time to the first token over HTTP, warm prefix of {prompt}, {own} own, over --against",
        "against:first_token", Shape(1, 1000, 4, own=48), None, wants_less=True, needs_server=True,
    ),  # some tokens, as the first one may have no text yet
)  # fmt: skip


def choose(names: str | None, rows: tuple[Row, ...] = ROWS, has_server: bool = False) -> tuple[Row, ...]:
    """Those of `rows` that are named in a text like "tokens,prefill", in the order of the table; for None all that can
    be measured with or without another server.

    Raises InvalidConfigError for a name that no row has, and for one that needs another server where there is none.
    """
    possible = tuple(row for row in rows if has_server or not row.needs_server)
    if names is None:
        return possible
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in {row.name for row in rows}]
    if unknown:
        known = ", ".join(row.name for row in rows)
        raise InvalidConfigError(f"--only {','.join(unknown)}: there is no such row; the rows are {known}")
    missing = [row.name for row in rows if row.name in wanted and row not in possible]
    if missing:
        raise InvalidConfigError(f"--only {','.join(missing)}: this needs another server; give it by --against URL")
    return tuple(row for row in possible if row.name in wanted)
