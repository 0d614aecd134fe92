"""The variants of a replay: the plan's own sizes, and what `--over` puts in their place."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hfpaged.config import format_bytes
from hfpaged.engine.pacing import DEFAULT_STRETCH
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import USUAL_SEQUENCES
from hfpaged.planner.fit import Fit, fit
from hfpaged.planner.trace import Trace
from hfpaged.planner.variant import ROUTERS, Variant, variant_of
from hfpaged.serve import flag_types as types

MOST = 1000  # variants of one call


def _router(text: str) -> str:
    if text not in ROUTERS:
        raise argparse.ArgumentTypeError(f"{text!r} is no router; use one of {', '.join(ROUTERS)}")
    return text


# By the name in --over: what reads a value, and which choice of a plan it is; two are sizes of the engine, and a router
# is one of the replay alone.
_CHOICES: dict[str, tuple[Callable[[str], Any], str]] = {
    "pool": (types.size, "pool"),
    "kv-dtype": (str, "kv_format"),
    "block-size": (types.block_size, "block_size"),
    "window": (lambda text: None if text == "none" else types.count(text), "window"),
    "max-num-seqs": (types.count, "max_num_seqs"),
    "token-budget": (types.count, "token_budget"),
    "replicas": (types.count, "replicas"),
    "router": (_router, "router"),
}


def over(text: str) -> tuple[str, list[Any]]:
    """What --over says: "block-size=8,16,32". For argparse, which tells what this raises."""
    name, _, values = text.partition("=")
    name = name.strip().replace("_", "-")
    if name not in _CHOICES or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {'=A,B  '.join(_CHOICES)}=A,B")
    read = _CHOICES[name][0]
    return name, [read(value.strip()) for value in values.split(",") if value.strip()]


def variants_of(found: Fit, lists: Sequence[tuple[str, list[Any]]]) -> list[Variant]:
    """All combinations of the values in `lists`, with the plan's own where there are none. Raises InvalidConfigError
    for those that cannot be.
    """
    names = [_CHOICES[name][1] for name, _ in lists]
    if twice := [name for name in set(names) if names.count(name) > 1]:
        raise InvalidConfigError(f"--over says {twice[0]} twice; write all values behind one, with commas")
    combinations = list(itertools.product(*(values for _, values in lists)))
    if len(combinations) > MOST:
        raise InvalidConfigError(
            f"--over makes {len(combinations)} variants, and at most {MOST} are run; leave some out"
        )
    made = [_variant(found, dict(zip(names, values, strict=True))) for values in combinations]
    return list(dict.fromkeys(made))  # for one replica all routers are one


def _variant(found: Fit, choices: dict[str, Any]) -> Variant:
    seqs, router = choices.pop("max_num_seqs", None), choices.pop("router", ROUTERS[0])
    planned = fit(found.case.choosing(**choices)) if choices else found
    max_num_seqs, replicas = seqs or planned.asked or USUAL_SEQUENCES, planned.case.choices.replicas
    if planned.pool <= 0:
        raise InvalidConfigError(
            f"weights and activations leave no room for a pool on {found.case.machine.name} (short by "
            f"{format_bytes(-planned.pool)}); give another --device, or the pool by --kv-cache-memory or --over pool="
        )
    return variant_of(
        planned.layout, planned.pool, max_num_seqs, window=planned.case.choices.window,
        max_num_batched_tokens=max(planned.case.choices.token_budget, max_num_seqs), replicas=replicas,
        router=router if replicas > 1 else ROUTERS[0],
    )  # fmt: skip


def recorded_variant(trace: Trace) -> Variant | None:
    """The sizes of the server that recorded the trace; None where it does not say, or not in numbers."""
    told = trace.header
    windows = told.get("windows")
    if not isinstance(windows, list):
        return None
    stretch = told.get("max_step_stretch", DEFAULT_STRETCH)
    counts = [told.get(name) for name in ("num_blocks", "block_size", "block_bytes", "max_num_seqs")]
    counts += [told.get("max_num_batched_tokens"), *(each for each in windows if each is not None)]
    most, watermark = told.get("max_num_queued_requests"), told.get("watermark", 0.01)
    if not all(type(count) is int and count > 0 for count in [*counts, *([] if most is None else [most])]):
        return None
    if not all(type(each) in (int, float) for each in (watermark, *([] if stretch is None else [stretch]))):
        return None
    sizes = {name: told[name] for name in ("num_blocks", "block_size", "block_bytes", "max_num_seqs")}
    try:
        return Variant(
            **sizes, windows=tuple(windows), max_num_batched_tokens=told["max_num_batched_tokens"],
            max_num_queued_requests=most, max_step_stretch=stretch, watermark=watermark,
            kv_format=str(told.get("kv_format", "auto")), prefix_sharing=bool(told.get("prefix_sharing", True)),
            by_priority=bool(told.get("by_priority", False)),
        )  # fmt: skip
    except InvalidConfigError:
        return None
