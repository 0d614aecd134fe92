"""A pool that is too small, too full or too large for what it is asked for."""

from __future__ import annotations

import math

from hfpaged.config import format_bytes
from hfpaged.doctor.derived import (
    GOOD_USE,
    NOTICED_WAIT,
    TARGET_USE,
    blocks,
    capacity,
    ended,
    has_enough,
    is_held_up_by,
    limit,
    mean_running,
    mean_waiting,
    preemptions_per_request,
    sequences_that_fit,
    use,
    use_now,
    wait_share,
)
from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Lacks, Reading
from hfpaged.doctor.words import number, percent, plural, round_down

# With one preemption for ten requests the pool does not hold what admission lets in.
OFTEN_PREEMPTED = 0.1
# A pool that is so full now while requests stand in the queue is what they wait for.
FULL_NOW = 0.95
# Of computed tokens so many were thrown away: a tenth of the device's time.
THRASH = 0.1
# A pool of which no more was ever touched, cached prefixes and all, and after how many requests that is believed.
HARDLY_TOUCHED, MANY_REQUESTS = 0.3, 100
# Factors beyond which a larger pool is no advice.
LARGEST_FACTOR = 8.0


def pool_full(reading: Reading) -> Finding | None:
    """Requests wait for blocks, or have theirs taken back."""
    waits_now = use_now(reading) >= FULL_NOW and reading.total("hfpaged_requests_waiting") > 0
    is_preempted = has_enough(reading) and preemptions_per_request(reading) >= OFTEN_PREEMPTED
    if not (is_held_up_by(reading, "blocks") or is_preempted or waits_now):
        return None
    return Finding("problem", "The KV pool is full", _signs(reading), _more_room(reading))


def _signs(reading: Reading) -> str:
    return (
        f"requests spend {percent(wait_share(reading, 'blocks'))} of their time waiting for blocks, "
        f"{number(mean_waiting(reading, 'blocks'))} of them on average beside {number(mean_running(reading))} "
        f"sequences that run; {plural(reading.total('hfpaged_preemptions_total'), 'preemption')} in "
        f"{plural(ended(reading), 'request')}; the pool of {format_bytes(capacity(reading))} is "
        f"{percent(use(reading))} full while there is work, {percent(use_now(reading))} now"
    )


def _more_room(reading: Reading) -> str:
    factor = wanted_factor(reading)
    pool = capacity(reading)
    ways = [f"a pool of {format_bytes(pool)} -> {format_bytes(pool * factor)} (memory=) or {_replicas(factor)}"]
    ways += [way for way in (_quantized(reading), _fewer(reading)) if way]
    return "; or ".join(ways)


def wanted_factor(reading: Reading) -> float:
    """How many times the pool would hold all that ran and waited for blocks at TARGET_USE, as far as max_num_seqs
    lets them in.
    """
    running = max(mean_running(reading), 1.0)
    wanted = min(running + mean_waiting(reading, "blocks"), max(limit(reading, "max_num_seqs"), running))
    factor = wanted / running * max(use(reading), use_now(reading)) / TARGET_USE
    return min(max(factor, 1.25), LARGEST_FACTOR)


def _replicas(factor: float) -> str:
    count = math.ceil(factor)
    return f"{plural(count - 1, 'more replica')} of this server"


def _quantized(reading: Reading) -> str | None:
    """By format of the pool."""
    kv_format = reading.label("hfpaged_kv_pool_info", "kv_format")
    whether = "says whether the model bears it"
    if any(small in kv_format for small in ("int4", "k8v4")):
        return None
    if any(eight in kv_format for eight in ("int8", "fp8")):
        more = "holds nearly twice as many tokens"
        return f"kv_dtype='int4' ({kv_format!r} now) {more}; `hfpaged quality --kv int4` {whether}"
    return f"kv_dtype='int8' ({kv_format!r} now) at least halves what a token takes; `hfpaged quality` {whether}"


def _fewer(reading: Reading) -> str | None:
    """Only where more are let in than fit: then it spares preemptions, and nobody waits for it who would not anyway."""
    most, fitting = limit(reading, "max_num_seqs"), sequences_that_fit(reading)
    if preemptions_per_request(reading) < OFTEN_PREEMPTED or not 1 <= fitting < most:
        return None
    return f"max_num_seqs {most} -> {round_down(fitting)}, which is what fits, so that nothing is computed twice"


def preemption_thrash(reading: Reading) -> Finding | None:
    """What was computed is thrown away and computed again."""
    lost = reading.total("hfpaged_preempted_tokens_total")
    computed = reading.total("hfpaged_computed_tokens_total")
    if not computed or lost / computed < THRASH:
        return None
    count = reading.total("hfpaged_preemptions_total")
    evidence = (
        f"{plural(count, 'preemption')} took back {number(lost)} stored tokens, {percent(lost / computed)} of the "
        f"{number(computed)} that were computed; {number(reading.total('hfpaged_requests_preempted'))} requests wait "
        "now to be computed again"
    )
    most, fitting = limit(reading, "max_num_seqs"), sequences_that_fit(reading)
    fewer = f"max_num_seqs {most} -> {round_down(fitting)}" if 1 <= fitting < most else "a smaller max_num_seqs"
    remedy = (
        f"{fewer}, or watermark=0.05, so that admission leaves room for those who run to grow; "
        "preemption='least_computed' where it is another; or a larger pool"
    )
    return Finding("problem", "Preemption thrash: the same tokens are computed again and again", evidence, remedy)


def pool_nearly_full(reading: Reading) -> Finding | None:
    """Nobody waits yet."""
    part = use(reading)
    is_full = wait_share(reading, "blocks") >= NOTICED_WAIT or preemptions_per_request(reading) >= OFTEN_PREEMPTED
    if part <= GOOD_USE[1] or is_full or not has_enough(reading):
        return None
    pool = capacity(reading)
    evidence = (
        f"it is {percent(part)} full while there is work, more than {percent(GOOD_USE[1])}, although requests hardly "
        f"wait for blocks ({percent(wait_share(reading, 'blocks'))} of their time)"
    )
    remedy = (
        f"before the load grows: a pool of {format_bytes(pool)} -> {format_bytes(pool * part / TARGET_USE)} (memory=), "
        "a smaller kv_dtype, or another replica"
    )
    return Finding("advice", "The KV pool has no room for a burst", evidence, remedy)


def pool_oversized(reading: Reading) -> Finding | None:
    """Nothing was ever evicted, so what is used and cached now is all that was ever kept."""
    total = blocks(reading)
    touched = blocks(reading, "used", "cached")
    is_kept = reading.total("hfpaged_kv_evicted_blocks_total") == 0 and blocks(reading, "cached") > 0
    if reading.seconds is not None:
        raise Lacks("all that happened since the process began, which a difference of two readings leaves out")
    if not total or not is_kept or ended(reading) < MANY_REQUESTS or touched / total > HARDLY_TOUCHED:
        return None
    pool = capacity(reading)
    evidence = (
        f"in {plural(ended(reading), 'request')} no prefix had to make room, and {number(touched)} of {number(total)} "
        f"blocks ({percent(touched / total)}) hold all that was ever kept"
    )
    needed = pool * touched / total / TARGET_USE
    remedy = f"if something else needs the memory: a pool of {format_bytes(pool)} -> {format_bytes(needed)} (memory=)"
    return Finding("advice", "The KV pool is far larger than what was ever used", evidence, remedy)
