"""What a replay has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from hfpaged.planner.replay_stats import ReplayStats
from hfpaged.planner.variant import Variant

SHARES = (0.5, 0.9, 0.99)
_SECONDS = ("busy", "ttft", "queue", "duration", "waits")


@dataclass(frozen=True)
class Spread:
    """Seconds: the mean, and the values that half, 9 of 10 and 99 of 100 do not exceed; None where there are none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class ReplicaPart:
    """What one of several engines had to do: `requests` that it got, and as in Outcome."""

    requests: int
    finished: int
    hit_rate: float
    preemptions: int
    busy: float
    pool_used: float

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {f"{name}_seconds" if name in _SECONDS else name: value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Outcome:
    """One variant on one trace. `seconds` of virtual time from the first arrival to the last end, `busy` of them in
    steps, the mean of all replicas; `parts` are what each of them did. Shares: `hit_rate` of the prompts' tokens,
    `pool_used` of the blocks (while steps ran), `waste` of the slots in held blocks. `refused` found
    a full queue, `too_long` can never fit the pool. `waits`: the mean of a request, seconds by cause.
    `was_interrupted`: figures are of the first requests only.
    """

    variant: Variant
    requests: int
    finished: int
    refused: int
    too_long: int
    seconds: float
    busy: float
    steps: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    requests_per_second: float
    mean_batch: float
    queried_tokens: int
    hit_tokens: int
    hit_rate: float
    preemptions: int
    recomputed_tokens: int
    pool_used: float
    most_blocks: int
    waste: float
    ttft: Spread
    gap: Spread
    queue: Spread
    duration: Spread
    waits: Mapping[str, float]
    parts: Sequence[ReplicaPart] = ()
    wall_seconds: float = 0.0
    was_interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """For programs, with units in the names; `itl_seconds` are the gaps between the tokens of a sequence."""
        names = {"gap": "itl_seconds", "parts": "replicas"} | {name: f"{name}_seconds" for name in _SECONDS}
        told = {names.get(name, name): value for name, value in asdict(self).items()}
        return told | {"replicas": [part.as_json() for part in self.parts]}


def outcome_of(
    variant: Variant, parts: Sequence[ReplayStats], seconds: float, wall_seconds: float, *, was_interrupted: bool
) -> Outcome:
    """The figures of a run of `seconds` virtual ones, by replica."""
    stats = reduce(ReplayStats.plus, parts)
    time = seconds or 1e-9
    return Outcome(
        variant=variant, requests=stats.arrived, finished=stats.finished, refused=stats.refused,
        too_long=stats.too_long, seconds=seconds, busy=stats.busy_seconds / len(parts), steps=stats.steps,
        prompt_tokens_per_second=stats.prefills / time, output_tokens_per_second=stats.output_tokens / time,
        requests_per_second=stats.finished / time, mean_batch=stats.sequences / max(stats.steps, 1),
        queried_tokens=stats.queried, hit_tokens=stats.hits, hit_rate=stats.hit_rate,
        preemptions=stats.preemptions, recomputed_tokens=max(stats.lost - stats.found_again, 0),
        pool_used=stats.mean_blocks / variant.num_blocks, most_blocks=stats.most_blocks,
        waste=stats.empty_slots / stats.used_slots if stats.used_slots else 0.0,
        ttft=_spread(stats.ttft), queue=_spread(stats.queue), duration=_spread(stats.duration),
        gap=Spread(stats.gaps.mean, *map(stats.gaps.percentile, SHARES)),
        waits={cause: total / max(stats.finished, 1) for cause, total in stats.waits.items()},
        parts=[_part(variant, each) for each in parts], wall_seconds=wall_seconds, was_interrupted=was_interrupted,
    )  # fmt: skip


def _part(variant: Variant, stats: ReplayStats) -> ReplicaPart:
    return ReplicaPart(
        stats.arrived, stats.finished, stats.hit_rate, stats.preemptions, stats.busy_seconds,
        stats.mean_blocks / variant.num_blocks,
    )  # fmt: skip


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(None, None, None, None)
    last = len(ordered) - 1
    return Spread(sum(ordered) / len(ordered), *(ordered[round(share * last)] for share in SHARES))
