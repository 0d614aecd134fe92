"""Replays for people: a table, and what stands out in a line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfpaged.planner.knee import takes_off
from hfpaged.planner.outcome import Outcome, ReplicaPart, Spread
from hfpaged.planner.replay_report import Report
from hfpaged.planner.units import binary, lasting
from hfpaged.planner.variant import Variant

WIDTH = 150  # where stdout is no terminal

_SETTINGS: dict[str, Callable[[Variant], str]] = {
    "replicas": lambda variant: str(variant.replicas),
    "router": lambda variant: variant.router if variant.replicas > 1 else "-",
    "KV": lambda variant: variant.kv_format,
    "window": lambda variant: str(variant.window or "-"),
    "pool": lambda variant: binary(variant.pool_bytes) if variant.block_bytes else f"{variant.num_blocks} blocks",
    "block": lambda variant: str(variant.block_size),
    "seqs": lambda variant: str(variant.max_num_seqs),
    "budget": lambda variant: str(variant.max_num_batched_tokens),
}
_FIGURES: dict[str, Callable[[Outcome], str]] = {
    "hits": lambda found: f"{found.hit_rate:.1%}",
    "pre-\nempted": lambda found: f"{found.preemptions:,}",
    "waste": lambda found: f"{found.waste:.1%}",
    "pool\nused": lambda found: f"{found.pool_used:.0%}",
    "batch": lambda found: f"{found.mean_batch:.1f}",
    "out\ntok/s": lambda found: f"{found.output_tokens_per_second:,.0f}",
    "queue\np50 / p99": lambda found: _pair(found.queue),
    "TTFT\np50 / p99": lambda found: _pair(found.ttft),
    "ITL\np50 / p99": lambda found: _pair(found.gap),
}
# Of the replica that has least of it, and of the one that has most.
_OF_REPLICAS: dict[str, Callable[[Outcome], str]] = {
    "requests\neach": lambda found: _range([f"{part.requests:,}" for part in _by(found, "requests")]),
    "busy\neach": lambda found: _range([f"{part.busy / (found.seconds or 1):.0%}" for part in _by(found, "busy")]),
}


def show(report: Report) -> None:
    """Print it; the verdict comes last."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for line in report.about():
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(_table(report.outcomes))
    for line in report.notes():
        console.print(Text(f"note: {line}", style="yellow"), soft_wrap=True)
    console.print(Text(report.verdict(), style="bold"), soft_wrap=True)


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False)
    varying = [name for name, of in _SETTINGS.items() if len({of(each.variant) for each in outcomes}) > 1]
    names = varying or ["pool"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    figures = _FIGURES | (_OF_REPLICAS if any(each.variant.replicas > 1 for each in outcomes) else {})
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    for found in outcomes:
        cells = [_SETTINGS[name](found.variant) for name in names] + [of(found) for of in figures.values()]
        table.add_row(*cells, style="red" if takes_off(found) else None)
    return table


def _by(found: Outcome, name: str) -> list[ReplicaPart]:
    return sorted(found.parts, key=attrgetter(name))


def _range(ordered: list[str]) -> str:
    return " - ".join(dict.fromkeys((ordered[0], ordered[-1])))


def _pair(spread: Spread) -> str:
    return " / ".join("-" if value is None else lasting(value) for value in (spread.p50, spread.p99))
