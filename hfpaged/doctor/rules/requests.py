"""Requests that fail, are refused, are given up, or stand in the queue."""

from __future__ import annotations

from collections.abc import Mapping

from hfpaged.doctor.derived import ENOUGH_REQUESTS, calls, ended, has_enough, limit, main_wait, wait_share, waits
from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Lacks, Reading
from hfpaged.doctor.words import duration, number, percent, plural

# One failed request in a hundred is what service levels of "two nines" allow.
FAILING = 0.01
# A client with a wrong parameter is its own fault; one request in twenty is a limit that does not fit the traffic.
REJECTED = 0.05
# People stop an answer now and then; one in five is impatience or a timeout that is too short.
ABORTED = 0.2
# A queue of a second is felt; one that is shorter than a third of a request is not what makes it slow.
LONG_QUEUE, QUEUE_SHARE = 1.0, 0.3

REMEDIES = {
    "blocks": "the pool is what they wait for: a larger one, kv_dtype='int8', or another replica",
    "seats": "max_num_seqs is what they wait for: raise it if the pool has room, else add a replica",
    "budget": "the token budget is what they wait for: raise max_num_batched_tokens or max_step_stretch",
    "prefix": "they wait for a prefix that another request computes: compute and pin it before the load comes "
    "(pool.pin_prefix)",
    "turn": "they wait for their turn at the next step: steps are long, so lower max_num_batched_tokens",
}


def failing(reading: Reading) -> Finding | None:
    """Requests and calls of generate() that ended in an error."""
    errors = raised = reading.get("hfpaged_generate_calls_total", outcome="error") or 0.0
    total = calls(reading)
    if not total or reading.get("hfpaged_requests_received_total"):  # there are batchers too
        errors += reading.total("hfpaged_requests_finished_total", finish_reason="error")
        total += reading.total("hfpaged_requests_received_total")
    if not errors:
        return None
    share = errors / max(total, errors)
    evidence = f"{plural(errors, 'request')} of {number(total)} ended with an error: {percent(share)}"
    remedies = []
    if errors > raised:
        remedies.append(
            "see output.error of such a request, error.type of its span or the log: a request fails alone, of a "
            "processor of its own or of logits that are no numbers; out of memory fails all that run, so lower "
            "max_num_batched_tokens then"
        )
    if raised:
        remedies.append(
            f"see what {plural(raised, 'call')} of generate() raised, or error.type of the spans; where memory or "
            "blocks run out, a smaller batch, or another size of the pool (memory= or num_blocks= of PagedCache)"
        )
    return Finding("problem" if share >= FAILING else "advice", "Requests fail", evidence, "; ".join(remedies))


def rejected(reading: Reading) -> Finding | None:
    """Requests that were refused before they waited."""
    reasons = reading.by("hfpaged_requests_rejected_total", "reason")
    received = reading.total("hfpaged_requests_received_total")
    total = sum(reasons.values())
    if received < ENOUGH_REQUESTS or total / received < REJECTED:
        return None
    share = percent(total / received)
    evidence = f"{number(total)} of {plural(received, 'request')} were refused ({share}): {_listed(reasons)}"
    return Finding("problem", "Many requests are refused", evidence, _let_in(reading, reasons))


def _let_in(reading: Reading, reasons: Mapping[str, float]) -> str:
    main = max(reasons, key=lambda reason: reasons[reason])
    if "long" in main.lower():
        return f"they are longer than the model or the pool: {_longest(reading)}, or have clients ask for fewer tokens"
    if "queue" in main.lower():
        return (
            "the queue was full (max_num_queued_requests): that is how an overload should end, so add a replica, or "
            "raise max_num_seqs and give the pool more where there is room; a longer queue helps against bursts alone"
        )
    if "closed" in main.lower():
        return "they came after close(): let clients know, or close with drain=True when none come any more"
    return "correct what the clients send; the error that each of them got says what is wrong"


def _longest(reading: Reading) -> str:
    try:
        return f"raise max_model_len from {limit(reading, 'max_model_len')} if the model can, and give the pool more"
    except Lacks:
        return "give the pool more (memory=)"


def aborted(reading: Reading) -> Finding | None:
    """Requests that were given up by who brought them."""
    count, total = reading.total("hfpaged_requests_aborted_total"), ended(reading)
    if not has_enough(reading) or count / total < ABORTED:
        return None
    first = reading.histogram("hfpaged_time_to_first_token_seconds").quantile(0.95)
    told = f"; 5 % wait longer than {duration(first)} for their first token" if first is not None else ""
    evidence = f"{number(count)} of {plural(total, 'request')} were aborted ({percent(count / total)}){told}"
    remedy = (
        "compare that with the timeout of the clients: lengthen it, or shorten the queue; if they stop answers that "
        "are too long, lower max_new_tokens"
    )
    return Finding("advice", "Many requests are given up", evidence, remedy)


def long_queue(reading: Reading) -> Finding | None:
    """Requests wait long before they begin."""
    queue = reading.histogram("hfpaged_request_queue_seconds")
    late = queue.quantile(0.95) or 0.0
    share = queue.sum / max(reading.histogram("hfpaged_request_duration_seconds").sum, queue.sum, 1e-9)
    cause = main_wait(reading)
    if not has_enough(reading) or late < LONG_QUEUE or share < QUEUE_SHARE or cause is None:
        return None
    evidence = (
        f"1 in 20 requests waits longer than {duration(late)} before it begins, and all of them {percent(share)} of "
        f"their time; {number(reading.total('hfpaged_requests_waiting'))} wait now; most of the waiting is for {cause} "
        f"({percent(waits(reading)[cause] / sum(waits(reading).values()))} of it, "
        f"{percent(wait_share(reading, cause))} of the time of requests)"
    )
    return Finding("problem", "The queue is long", evidence, REMEDIES.get(cause, f"find out what holds {cause} up"))


def _listed(reasons: Mapping[str, float]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{number(count)} x {reason}" for reason, count in ordered if count)
