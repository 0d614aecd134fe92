"""The verdict: each thing that is wrong, by which rule, with its suspects and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hfpaged.config import format_bytes
from hfpaged.stress.facts import Facts, Trend
from hfpaged.stress.slope import Slope
from hfpaged.stress.watch import FULL

# Growth is what is sure of the slope after the warm-up, over all requests since: more than the first, and more than so
# much for each. Allocators and caches of a sound process stay below: found with 30 minutes of load on a server.
MOST_BYTES, MOST_BYTES_EACH = 12 * 2**20, 512
SLOWER = 1.5  # times as long for each token, in the last third against the first
JUDGED_SECONDS = 30  # shorter runs are no measure of what grows slower
MOST_RECOMPUTED = 0.15  # of all computed tokens: more is asked for than the pool holds at any time, so that some is


@dataclass(frozen=True)
class Finding:
    """One word, what was found and by which rule, what to do, and who is suspected."""

    name: str
    text: str
    remedy: str
    suspects: tuple[str, ...] = field(default=())


def judge(facts: Facts) -> list[Finding]:
    """All that is wrong, the worst first; nothing for a clean run."""
    return [
        finding
        for rule in (_wrong, _leak, _failed, _counters, _growth, _slower, _thrash, _unfilled)
        for finding in rule(facts)
    ]


def _wrong(facts: Facts) -> Iterator[Finding]:
    if facts.differences:
        text = f"{len(facts.differences)} of {facts.checked} requests that were computed again, alone, got other tokens"
        remedy = "report it with the model's config and --seed; use the model without hfpaged until it is mended"
        yield Finding("wrong", text, remedy, tuple(facts.differences[:5]))


def _leak(facts: Facts) -> Iterator[Finding]:
    remedy = "a bug of hfpaged, or of who keeps caches: report it with these lines"
    if facts.broken is not None:
        said, *histories = facts.broken.splitlines()
        yield Finding("leak", f"the books of the pool do not agree: {said}", remedy, tuple(histories))
    if facts.leaked:
        text = f"{len(facts.leaked)} of {facts.num_blocks} blocks are still held after all requests and caches are gone"
        yield Finding("leak", text, remedy, tuple(str(each) for each in facts.leaked[:8]))


def _failed(facts: Facts) -> Iterator[Finding]:
    if facts.failed:
        text = f"{facts.failed} of {facts.received} requests ended with an error"
        yield Finding("failed", text, "see the errors; HFPAGED_DEBUG=1 tells more", tuple(facts.errors[:5]))
    if facts.stuck:
        text = f"{facts.stuck} of {facts.received} requests stood still after all others had ended, and were given up"
        yield Finding("failed", text, "a bug of hfpaged: report it with the model's config and --seed")


def _counters(facts: Facts) -> Iterator[Finding]:
    ended = facts.finished + facts.failed + facts.aborted + facts.rejected
    outside = {
        "received": facts.received, "finished": facts.finished + facts.failed, "aborted": facts.aborted,
        "rejected": facts.rejected,
    }  # fmt: skip
    if facts.received != ended + facts.in_flight:
        text = f"{facts.received} received are not {ended} ended (in whatever way) and {facts.in_flight} in flight"
        yield Finding("counters", text, "report it: a request was lost, or told of twice")
    elif facts.own_counts and facts.own_counts != outside:
        text = f"the batcher counts {facts.own_counts}, and sent and got were {outside}"
        yield Finding("counters", text, "report it: metrics of this batcher cannot be trusted")


def _growth(facts: Facts) -> Iterator[Finding]:
    for kind, found in (("resident", facts.resident), ("device", facts.device)):
        if found is not None and grows(found):
            text = (
                f"{kind} memory grows by {found.each:,.0f} +- {found.margin:,.0f} bytes with each request: surely "
                f"{format_bytes(found.surely)} in {found.span:.0f} requests after the warm-up, and the rule allows "
                f"{format_bytes(allowed(found))} (12 MiB, or 512 bytes for each request)"
            )
            suspects = tuple(f"{count:+,} objects of type {name}" for name, count in facts.grown[:5])
            yield Finding("growth", text, "run it longer: a leak keeps its slope; look at what grew", suspects)


def allowed(found: Slope) -> float:
    """Bytes that may come with so many requests."""
    return max(MOST_BYTES, MOST_BYTES_EACH * found.span)


def grows(found: Slope) -> bool:
    """Whether even the least that is sure is more than is allowed."""
    return found.surely > allowed(found)


def _slower(facts: Facts) -> Iterator[Finding]:
    trend = Trend.of(facts.per_token)
    if trend is not None and facts.seconds >= JUDGED_SECONDS and trend.ratio > SLOWER:
        text = (
            f"a token takes {1000 * trend.last:.1f} ms in the end and took {1000 * trend.first:.1f} at first (medians "
            f"of a third each, {trend.ratio:.2f}x, at most {SLOWER}x)"
        )
        yield Finding("slower", text, "see that nothing else runs on this machine, then run it longer")


def _thrash(facts: Facts) -> Iterator[Finding]:
    if facts.recomputed > MOST_RECOMPUTED:
        text = (
            f"{100 * facts.recomputed:.0f} % of all computed tokens were computed again after {facts.preemptions} "
            f"preemptions (at most {100 * MOST_RECOMPUTED:.0f} %)"
        )
        remedy = "fewer sequences at once (--max-num-seqs), a larger pool (--memory), or a smaller KV format (int8)"
        yield Finding("thrash", text, remedy)


def _unfilled(facts: Facts) -> Iterator[Finding]:
    if facts.peak < FULL:
        text = (
            f"at most {100 * facts.peak:.0f} % of the pool was in use, and below {100 * FULL:.0f} % nothing is proven"
        )
        yield Finding("unfilled", text, "a smaller --memory, more --max-num-seqs, a longer --context, or more time")
    elif not facts.checked:
        text = f"{facts.finished} requests finished and none was computed again, so that no token is proven"
        yield Finding("unfilled", text, "more time, or a shorter --length")
