"""A plan for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hfpaged.planner import words
from hfpaged.planner.case import Choices, Machine, Workload
from hfpaged.planner.fit import Fit
from hfpaged.planner.several_rows import prefix_bytes
from hfpaged.planner.tiers import tiers
from hfpaged.planner.ways_out import WayOut

# By field of a machine, choices or a workload: what its number counts, where the name alone does not tell.
_UNITS = dict.fromkeys(("memory", "overhead", "in_use", "pool", "swap_space"), "bytes")
_UNITS |= dict.fromkeys(("prompt", "output", "context", "shared_prefix", "encoder", "window"), "tokens")
_UNITS |= {"bandwidth": "gb_per_second", "link": "gb_per_second", "store_size": "bytes"}


def as_json(found: Fit, ways: Sequence[WayOut], code: int) -> dict[str, Any]:
    """Everything that the report says, and the exit code. Bytes are of one rank of one replica, but for `replicas`."""
    facts = found.case.sizes.facts
    return {
        "model": facts.name,
        "model_type": facts.model_type,
        "dtype": facts.dtype,
        "layers": words.layers(facts),
        "machine": _named(found.case.machine),
        "choices": _named(found.case.choices),
        "workload": _named(found.case.workload),
        "memory": _memory(found),
        "kv": _kv(found),
        "replicas": _replicas(found),
        "tiers": [tier.as_json() for tier in tiers(found)],
        "fits": found.fits,
        "short_bytes": found.short,
        "sequences": found.sequences,
        "longest_tokens": found.longest if found.pool > 0 else 0,
        "pool_tokens": found.tokens,
        "verdict": words.verdict(found),
        "remarks": words.remarks(found),
        "ways_out": [_way(way) for way in ways],
        "exit_code": code,
    }


def _memory(found: Fit) -> dict[str, Any]:
    return {
        "usable_bytes": found.usable,
        "weights_bytes": found.weights.bytes,
        "weights_source": found.weights.source,
        "activations_bytes": found.activations,
        "pool_bytes": found.pool,
        "pool_blocks": max(0, found.pool) // found.layout.block_bytes if found.layout.block_bytes else None,
    }


def _kv(found: Fit) -> dict[str, Any]:
    layout = found.layout
    return {
        "format": layout.kv_format,
        "block_tokens": layout.block_size,
        "block_bytes": layout.block_bytes,
        "windows_tokens": list(layout.windows),
        "state_bytes": layout.state_bytes,
        "residual_bytes": layout.residual_bytes,
        "token_bytes": layout.block_bytes * len(layout.windows) / layout.block_size,
        "token_bytes_outside_blocks": layout.token_bytes,
        "request_blocks": layout.blocks(found.case.workload.tokens),
        "request_bytes": found.request,
        "prompt_passing_bytes": found.passing,
        "needed_bytes": found.needed,
        "dynamic_cache_bytes": found.dense,
    }


def _replicas(found: Fit) -> dict[str, Any]:
    choices = found.case.choices
    return {
        "count": choices.replicas,
        "devices": choices.replicas * choices.tp,
        "sequences": found.sequences * choices.replicas,
        "pools_bytes": max(0, found.pool) * choices.replicas * choices.tp,
        "shared_prefix_bytes": prefix_bytes(found) * choices.replicas * choices.tp,
    }


def _way(way: WayOut) -> dict[str, Any]:
    return {
        "change": way.title,
        "costs": way.costs,
        "price": round(way.price, 4),
        "served": way.is_served,
        "choices": _named(way.fit.case.choices),
        "workload": _named(way.fit.case.workload),
        "machine": way.fit.case.machine.name,
        "sequences": way.fit.sequences,
        "pool_bytes": way.fit.pool,
        "verdict": words.verdict(way.fit),
    }


def _named(record: Machine | Choices | Workload) -> dict[str, Any]:
    """Its fields, with units in their names."""
    return {f"{name}_{_UNITS[name]}" if name in _UNITS else name: value for name, value in asdict(record).items()}
