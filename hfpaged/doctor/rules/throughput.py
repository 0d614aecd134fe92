"""The pool has room, and yet it could be faster: what else holds requests up. Or nothing does."""

from __future__ import annotations

from hfpaged.doctor.derived import (
    GOOD_USE,
    NOTICED_WAIT,
    has_enough,
    hit_rate,
    is_held_up_by,
    limit,
    main_wait,
    mean_running,
    mean_waiting,
    num_steps,
    prefill_share,
    sequences_that_fit,
    tokens_per_second,
    use,
    wait_share,
)
from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import number, percent, plural, round_down, round_up

# Steps with prompt tokens that bring less than this part of the budget are held back by something else.
NEAR_BUDGET = 0.5
# What the budget may be raised to without measuring: longer steps let others' tokens come late.
ENOUGH_BUDGET = 8192
# Time of the steps that have prompt tokens, and these as a part of all tokens.
PREFILL_SECONDS, PREFILL_TOKENS = 0.7, 0.8
# A step of a small model takes a quarter for scheduling; with more than this the device waits for Python.
SCHEDULING = 0.4
FEW_STEPS = 20


def seats_taken(reading: Reading) -> Finding | None:
    """max_num_seqs holds requests up although there are blocks."""
    if not is_held_up_by(reading, "seats") or use(reading) >= GOOD_USE[0]:
        return None
    most, fitting = limit(reading, "max_num_seqs"), sequences_that_fit(reading)
    wanted = most + mean_waiting(reading, "seats")
    if fitting < most + 1:  # more would not fit
        return None
    new = max(round_down(fitting), most + 1) if fitting < wanted else round_up(wanted)
    evidence = (
        f"requests spend {percent(wait_share(reading, 'seats'))} of their time waiting for one of max_num_seqs={most} "
        f"seats, {number(mean_waiting(reading, 'seats'))} of them on average, while the pool is "
        f"{percent(use(reading))} full and would hold {number(fitting)} such sequences at 80 %"
    )
    budget = limit(reading, "max_num_batched_tokens")
    more = f", and max_num_batched_tokens {budget} -> {round_up(new)}, as each may want a token" if new > budget else ""
    remedy = f"max_num_seqs {most} -> {new}{more}"
    return Finding("problem", "max_num_seqs is too small: the pool is not used", evidence, remedy)


def budget_small(reading: Reading) -> Finding | None:
    """Prompts wait for tokens of the step."""
    if not is_held_up_by(reading, "budget"):
        return None
    budget = limit(reading, "max_num_batched_tokens")
    prefill = reading.histogram("hfpaged_step_tokens", phase="prefill")
    per_step = prefill.mean + reading.histogram("hfpaged_step_tokens", phase="decode").mean
    evidence = (
        f"requests spend {percent(wait_share(reading, 'budget'))} of their time waiting for a part of the token "
        f"budget, {number(mean_waiting(reading, 'budget'))} of them on average; a step with prompt tokens has "
        f"{number(per_step)} tokens of max_num_batched_tokens={budget}, and the pool is {percent(use(reading))} full"
    )
    if per_step < NEAR_BUDGET * budget:
        title = "Prompts are held back so that running sequences keep their pace"
        remedy = (
            "if the first token matters more than the next ones: max_step_stretch=4 (2 by default; None: no limit), so "
            "that a step may bring more prompt tokens while others stream"
        )
        return Finding("advice", title, evidence, remedy)  # as was wanted, for all that this doctor knows
    waiting = mean_waiting(reading, "budget") * reading.histogram("hfpaged_request_prompt_tokens").mean
    new = round_up(min(max(budget + waiting, 2 * budget), max(ENOUGH_BUDGET, 2 * budget)))
    remedy = f"max_num_batched_tokens {budget} -> {new}; activations of a step grow with it, so leave memory for them"
    return Finding("problem", "The token budget is too small", evidence, remedy)


def scheduling_bound(reading: Reading) -> Finding | None:
    """The device waits for Python."""
    seconds = reading.by("hfpaged_step_seconds_total", "part")
    total, steps = sum(seconds.values()), num_steps(reading)
    part = seconds.get("scheduling", 0.0) / total if total else 0.0
    if steps < FEW_STEPS or part < SCHEDULING:
        return None
    evidence = (
        f"of {1000 * total / steps:.1f} ms of a step, the forward takes "
        f"{percent(seconds.get('forward', 0.0) / total)}, the sampler {percent(seconds.get('sampling', 0.0) / total)} "
        f"and scheduling {percent(part)}, with {number(mean_running(reading))} sequences in a step"
    )
    remedy = (
        "look for slow hooks, listeners and stop checks of requests (they run between steps), give the process a CPU "
        "core of its own (other threads hold the GIL), or have fewer, longer steps with a larger max_num_seqs"
    )
    return Finding("advice", "Bound by the CPU: the device waits for scheduling", evidence, remedy)


def prefill_bound(reading: Reading) -> Finding | None:
    """Prompts take the time, not memory."""
    prefill = reading.histogram("hfpaged_step_duration_seconds", phase="prefill").sum
    total = reading.histogram("hfpaged_step_duration_seconds").sum
    tokens = prefill_share(reading)
    is_slow = has_enough(reading) and wait_share(reading) >= NOTICED_WAIT
    if not is_slow or not total or prefill / total < PREFILL_SECONDS or tokens < PREFILL_TOKENS:
        return None
    if use(reading) >= GOOD_USE[0]:
        return None
    evidence = (
        f"steps with prompt tokens take {percent(prefill / total)} of the time and bring {percent(tokens)} of all "
        f"tokens, while the pool is {percent(use(reading))} full; {percent(hit_rate(reading))} of prompt tokens are "
        f"found in the prefix cache; requests wait {percent(wait_share(reading))} of their time"
    )
    remedy = (
        "compute fewer prompt tokens: have prompts begin with what they share, make them shorter; or add a replica, "
        "as the pool is not what is short"
    )
    return Finding("advice", "Bound by prefill: prompts take the time, not memory", evidence, remedy)


def few_requests(reading: Reading) -> Finding | None:
    """The pool is half empty, and that is no problem."""
    is_idle = main_wait(reading) is None or wait_share(reading) < NOTICED_WAIT
    if not has_enough(reading) or use(reading) >= GOOD_USE[0] or not is_idle:
        return None
    evidence = (
        f"it is {percent(use(reading))} full while there is work, with "
        f"{plural(round(mean_running(reading)), 'sequence')} in a step of at most {limit(reading, 'max_num_seqs')}; "
        f"requests wait {percent(wait_share(reading))} of their time, and {number(tokens_per_second(reading))} "
        "tokens/s come out"
    )
    remedy = "none is needed: more requests at once find room, and each step would give more tokens"
    return Finding("note", "The pool is not full because there are few requests", evidence, remedy)
