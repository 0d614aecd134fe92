"""A plan for people: where the memory goes, what a request takes, what fits, and the ways out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hfpaged.planner import words
from hfpaged.planner.fit import MANY, Fit
from hfpaged.planner.several_rows import Row, size_row, tier_rows, together
from hfpaged.planner.tiers import tiers
from hfpaged.planner.ways_out import WayOut

WIDTH = 120  # where stdout is no terminal


def show(found: Fit, ways: Sequence[WayOut]) -> None:
    """Print it; the verdict comes last but for the ways out."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    facts = found.case.sizes.facts
    console.print(Text(f"{facts.name} on {found.case.machine.name}", style="bold"))
    for line in filter(None, (*words.layers(facts), words.grouped(facts))):
        console.print(Text(f"  {line}", style="dim"))
    _section(console, "Where the memory goes" + _rank(found), _memory(found))
    _section(console, "What requests take", _requests(found))
    if found.pool > 0:
        _section(console, "What fits" + _replica(found), _room(found))
    if found.case.choices.replicas > 1:
        _section(console, f"What {found.case.choices.replicas} replicas have together", together(found))
    if below := tiers(found):
        _section(console, "Tiers below the pool", tier_rows(below))
    console.print()
    for remark in words.remarks(found):
        console.print(Text(f"note: {remark}", style="yellow"))
    console.print(Text(words.verdict(found), style="bold green" if found.fits else "bold red"))
    if not found.fits:
        _ways(console, ways)


def _section(console: Console, title: str, rows: Iterable[Row]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, justify="right")
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(Text(f"\n{title}", style="bold"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _rank(found: Fit) -> str:
    choices = found.case.choices
    ranks = "" if choices.tp == 1 else f", on each of {choices.tp} devices"
    return ranks + _replica(found)


def _replica(found: Fit) -> str:
    replicas = found.case.choices.replicas
    return "" if replicas == 1 else f", of each of {replicas} replicas"


def _memory(found: Fit) -> Iterable[Row]:
    machine, choices = found.case.machine, found.case.choices
    blocks = f"{max(0, found.pool) // found.layout.block_bytes:,} blocks" if found.layout.block_bytes else "no blocks"
    if choices.pool is not None:
        yield size_row("pool", choices.pool, f"as given; {blocks}")
        return
    yield size_row("device", machine.memory, machine.origin)
    part = f", divided by {choices.replicas} replicas" if machine.is_cpu and choices.replicas > 1 else ""
    yield size_row("usable", found.usable, f"--utilization {choices.utilization:g}{part}")
    if machine.in_use:
        yield size_row("- in use now", found.in_use, f"by others{part}")
    yield size_row("- weights", found.weights.bytes, found.weights.source)
    yield size_row("- activations", found.activations, f"of a step of {choices.token_budget:,} tokens (--token-budget)")
    yield size_row("- overhead", machine.overhead, "the device's context, libraries, fragments (--overhead)")
    yield size_row("= pool", found.pool, blocks if found.pool > 0 else "nothing is left")


def _requests(found: Fit) -> Iterable[Row]:
    layout, workload = found.layout, found.case.workload
    if layout.windows:
        block = layout.block_bytes * len(layout.windows)
        yield size_row(
            "a token", block / layout.block_size, f"KV format {layout.kv_format}, {_dtype(found)}{_while(found)}"
        )
        yield size_row("a block", layout.block_bytes, f"{layout.block_size} tokens{_groups(found)}")
    if besides := found.beside(workload.tokens):
        read = f", and the {workload.encoder:,} tokens of its encoder" if workload.encoder else ""
        yield size_row("besides", besides, f"what each sequence keeps outside of blocks{read}")
    tokens = f"{workload.prompt:,} + {workload.output:,}" if workload.output else f"{workload.tokens:,}"
    yield size_row("a request", found.request, f"{tokens} tokens: {layout.blocks(workload.tokens):,} blocks")
    if found.passing:
        beyond = f"up to {found.case.choices.token_budget:,} tokens (--token-budget) beyond windows"
        yield size_row("a prompt", found.passing, f"while it is computed, one at a time: {beyond}")
    if found.concurrency > 1:
        shared = f", {workload.shared_prefix:,} tokens of each the same" if workload.shared_prefix else ""
        all_of_them = found.kv_bytes(workload.tokens, found.concurrency)
        yield size_row(f"{found.concurrency:,} requests", all_of_them, f"at once{shared}")
    yield size_row(
        "DynamicCache", found.dense, "what transformers' own cache would take for as many, without its copies"
    )
    if workload.context > workload.tokens:
        yield size_row("the longest", found.kv_bytes(workload.context, 1), f"--context {workload.context:,}")


def _room(found: Fit) -> Iterable[Row]:
    tokens = found.case.workload.tokens
    many = f"{found.sequences:,}" if found.sequences < MANY else "any number"
    yield ("requests at once", many, "", f"of {tokens:,} tokens each")
    asked = found.asked
    alone = f"tokens each, with {asked:,} at once" if asked else "tokens of one request alone"
    yield ("longest", f"{found.longest:,}", "", f"{alone}{_end(found)}")
    yield ("tokens", f"{found.tokens:,}", "", "in all requests together")


def _ways(console: Console, ways: Sequence[WayOut]) -> None:
    if not ways:
        console.print(Text("no way out was found: neither one change nor two make room; use a smaller model"))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for number, way in enumerate(ways, 1):
        table.add_row(str(number), Text(way.title), Text(way.costs))
    console.print(Text("\nWays out, the cheapest first, and what each costs", style="bold"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _end(found: Fit) -> str:
    return ", which is all that the model takes" if found.longest == found.limit else ""


def _dtype(found: Fit) -> str:
    return f"computed in {found.case.choices.dtype or found.case.sizes.facts.dtype}"


def _while(found: Fit) -> str:
    return ", until windows are full" if any(found.layout.windows) else ""


def _groups(found: Fit) -> str:
    """By their windows; nothing where there is one group that keeps everything."""
    windows = Counter(found.layout.windows)
    if windows == {None: 1}:
        return ""
    kinds = (
        f"{count} of {f'a window of {window:,}' if window else 'full attention'}" for window, count in windows.items()
    )
    return f" of one layer group ({', '.join(kinds)})"
