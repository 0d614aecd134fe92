"""Rows of a plan's table: what replicas have together, and what tiers keep."""

from __future__ import annotations

from collections.abc import Iterable

from hfpaged.planner.fit import MANY, Fit
from hfpaged.planner.tiers import TierPlan
from hfpaged.planner.units import binary, decimal, lasting

Row = tuple[str, ...]


def size_row(name: str, count: float, line: str) -> Row:
    """A name, a size in two units, and what there is to say."""
    return (name, decimal(count), binary(count), line)


def together(found: Fit) -> Iterable[Row]:
    """What all replicas hold, and what their number costs where prompts begin alike."""
    choices, workload = found.case.choices, found.case.workload
    devices = choices.replicas * choices.tp
    where = "in one memory" if found.case.machine.is_cpu else f"on {devices} such devices"
    many = f"{found.sequences * choices.replicas:,}" if found.sequences < MANY else "any number"
    yield ("requests at once", many, "", f"of {workload.tokens:,} tokens each, {where}")
    pools = max(0, found.pool) * devices
    yield size_row("pools", pools, "of all; a prefix that is asked for on several replicas lies in each of them")
    if workload.shared_prefix:
        yield size_row(
            "the shared prefix", prefix_bytes(found) * devices, f"once per replica: {choices.replicas} times"
        )


def prefix_bytes(found: Fit) -> int:
    """What the blocks that all requests share take in one pool."""
    return found.shared_blocks * found.layout.block_bytes


def tier_rows(below: Iterable[TierPlan]) -> Iterable[Row]:
    """Two of each: what it keeps, and whether that pays."""
    for tier in below:
        whose = "of each process" if tier.flag == "--swap-space" else "of all services on a machine"
        kept = f"{tier.blocks:,} blocks, {tier.tokens:,} tokens ({tier.flag}), {whose}"
        yield size_row(tier.name, tier.size, kept)
        word = "pays" if tier.pays else "does not pay"
        back, computed = lasting(tier.back), lasting(tier.computed)
        line = f"{back} a token at {tier.rate:g} GB/s ({tier.origin}), {computed} computed (an estimate)"
        yield ("", word, f"{tier.gain:.{0 if tier.gain >= 10 else 1}f} x", line)
