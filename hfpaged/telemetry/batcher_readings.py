"""What batchers have counted, and what they have in flight now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hfpaged.engine import tally_keys as keys
from hfpaged.engine.sums import Sums
from hfpaged.telemetry.readings import Readings

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher
    from hfpaged.engine.request import Request
    from hfpaged.engine.tally import Tally

RUNNING = ("hfpaged_requests_running",)
WAITING = ("hfpaged_requests_waiting",)
PREEMPTED = ("hfpaged_requests_preempted",)
# Those that wait for a prefix which another request computes; for who has a name for it.
DEFERRED = ("requests deferred",)
STALLED = "hfpaged_stalled_seconds"


def read_tally(readings: Readings, name: str, tally: Tally) -> None:
    """Counters and histograms, and by them how many requests are in flight: none of them runs, as far as is known."""
    sums, _ = tally.read()
    readings.of(name).add(sums)
    if tally.last_step_time is not None:
        readings.most(name, "hfpaged_last_step_timestamp_seconds", tally.last_step_time)
    readings.most(name, STALLED, 0.0)
    numbers = readings.of(name).numbers
    for key in (RUNNING, PREEMPTED, DEFERRED):
        numbers.setdefault(key, 0)
    numbers[WAITING] = in_flight(readings.of(name))


def in_flight(sums: Sums) -> int:
    """Requests that have come and not ended."""
    numbers = sums.numbers
    ended = sum(number for key, number in numbers.items() if key[0] in (keys.REJECTED, keys.FINISHED))
    return int(numbers[keys.RECEIVED] - numbers[keys.ABORTED] - ended)


def read_batcher(readings: Readings, batcher: ContinuousBatcher) -> None:
    """What of those that wait does run, what else they wait for, and the limits. After `read_tally`."""
    name = batcher.tally.model_name
    numbers = readings.of(name).numbers
    holding = batcher.requests_with_blocks()
    flying = batcher.tally.read()[1]
    running = min(len(holding & flying.keys()), int(numbers[WAITING]))
    numbers[RUNNING] += running
    numbers[WAITING] -= running
    waiting = {request_id: request for request_id, request in flying.items() if request_id not in holding}
    numbers[PREEMPTED] += min(sum(request.was_preempted for request in waiting.values()), int(numbers[WAITING]))
    readings.most(name, STALLED, batcher.tally.stalled_seconds())
    requests = batcher.loop.requests
    numbers[DEFERRED] += sum(_is_deferred(requests, request_id) for request_id in waiting)
    if not batcher.is_closed:
        _read_limits(readings, name, batcher.limits)


def _is_deferred(requests: Mapping[str, Request], request_id: str) -> bool:
    request = requests.get(request_id)
    return request is not None and any(group.waiting.awaits_prefix for group in list(request.groups))


def _read_limits(readings: Readings, name: str, limits: Mapping[str, int]) -> None:
    """Of several batchers the sequences add up; what one step or one request may take does not."""
    for limit, value in limits.items():
        if limit == "max_num_seqs":
            readings.count(name, "hfpaged_engine_limit", value, limit)
        else:
            readings.most(name, "hfpaged_engine_limit", value, limit)
