"""What is printed and written of a stress run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from hfpaged.config import format_bytes
from hfpaged.stress.facts import Facts, Trend
from hfpaged.stress.slope import Slope
from hfpaged.stress.verdict import Finding, allowed


def table(facts: Facts, findings: Sequence[Finding]) -> Table:
    """One row for each thing that was watched."""
    found = {finding.name for finding in findings}
    shown = Table(show_edge=False, pad_edge=False)
    for name in ("watched", "figures", "verdict"):
        shown.add_column(name, overflow="fold")
    for names, title, figures in _rows(facts):
        wrong = [name for name in names if name in found]
        shown.add_row(title, figures, ", ".join(wrong) or "ok")
    return shown


def _rows(facts: Facts) -> Iterator[tuple[tuple[str, ...], str, str]]:
    yield ("unfilled",), "pool", (
        f"{facts.num_blocks:,} blocks, at its peak {100 * facts.peak:.0f} % in use, {100 * facts.full_share:.0f} % of "
        "the time at least 90 %"
    )  # fmt: skip
    yield ("leak",), "blocks", "all came back" if not facts.leaked else f"{len(facts.leaked)} did not come back"
    yield ("failed", "counters"), "requests", (
        f"{facts.received:,} = {facts.finished:,} finished + {facts.aborted:,} aborted + {facts.rejected:,} refused + "
        f"{facts.failed} failed + {facts.in_flight} in flight"
    )  # fmt: skip
    yield ("wrong",), "tokens", (
        f"{facts.checked} requests computed again alone: {len(facts.differences)} differ"
        + (f", {facts.close} at a close call" if facts.close else "")
    )  # fmt: skip
    yield ("growth",), "memory", _memory(facts)
    times = _trend("per token", facts.per_token), _trend("to the first", facts.first_token)
    yield ("slower",), "time", "; ".join(filter(None, [f"{facts.throughput:,.0f} tokens/s", *times]))
    yield (
        ("thrash",),
        "preemptions",
        f"{facts.preemptions:,}, {100 * facts.recomputed:.1f} % of the tokens computed again",
    )
    yield (), "other caches", (
        f"{facts.other_rounds} rounds of generate() on the same pool, {facts.other_out_of_blocks} found it full"
    )  # fmt: skip


def _memory(facts: Facts) -> str:
    last = facts.samples[-1]
    parts = [f"{format_bytes(last.resident)} resident, {_slope(facts.resident)}"]
    if facts.device is not None:
        idle = format_bytes(last.reserved - last.allocated)
        parts.append(f"{format_bytes(last.reserved)} on the device ({idle} idle), {_slope(facts.device)}")
    return "; ".join(parts)


def _slope(found: Slope | None) -> str:
    return (
        "too short to see a slope" if found is None else f"{found.each:+,.0f} +- {found.margin:,.0f} bytes per request"
    )


def _trend(name: str, values: Sequence[float]) -> str:
    trend = Trend.of(values)
    return "" if trend is None else f"{name} {1000 * trend.first:.1f} -> {1000 * trend.last:.1f} ms"


def last_line(facts: Facts, findings: Sequence[Finding], stopped: bool) -> str:
    """The verdict in one sentence."""
    load = f"{facts.received:,} requests in {facts.seconds:.0f} s" + (" until it was interrupted" if stopped else "")
    if not findings:
        return (
            f"clean: {load}, the pool at least 90 % full for {100 * facts.full_share:.0f} % of the time: no leak, "
            f"{_growth(facts)}, no thrash, and {facts.checked} requests had the tokens that the model gives alone."
        )
    worst = findings[0]
    more = f" (also: {', '.join(each.name for each in findings[1:])})" if len(findings) > 1 else ""
    return f"{worst.name}: {worst.text}; {worst.remedy}{more}. {load}."


def _growth(facts: Facts) -> str:
    """What may be said of memory that was not found to grow."""
    slopes = [found for found in (facts.resident, facts.device) if found is not None]
    if facts.resident is None or any(found.at_most > allowed(found) for found in slopes):
        return "too short to exclude growth"
    return "no growth"


def as_json(
    header: Mapping[str, Any], facts: Facts, findings: Sequence[Finding], stopped: bool, exit_code: int
) -> dict[str, Any]:
    """For machines. Seconds, bytes, blocks, tokens; shares are parts of 1."""
    return {
        "header": dict(header),
        "verdict": findings[0].name if findings else "clean",
        "findings": [vars(finding) for finding in findings],
        "interrupted": stopped,
        "exit_code": exit_code,
        "seconds": facts.seconds,
        "pool": {"num_blocks": facts.num_blocks, "peak": facts.peak, "full_share": facts.full_share},
        "requests": {
            "received": facts.received, "finished": facts.finished, "aborted": facts.aborted,
            "rejected": facts.rejected, "failed": facts.failed, "in_flight": facts.in_flight, "stuck": facts.stuck,
            "kinds": dict(facts.kinds),
        },
        "tokens": {"generated": facts.tokens, "per_second": facts.throughput, "recomputed_share": facts.recomputed},
        "steps": facts.steps,
        "preemptions": facts.preemptions,
        "checked": {"requests": facts.checked, "close": facts.close, "differences": list(facts.differences)},
        "memory": {"resident": _slope_json(facts.resident), "device": _slope_json(facts.device)},
        "times": {
            "per_token": _trend_json(facts.per_token), "time_to_first_token": _trend_json(facts.first_token),
        },
        "leaked_blocks": [vars(each) for each in facts.leaked],
        "other_caches": {"rounds": facts.other_rounds, "out_of_blocks": facts.other_out_of_blocks},
        "samples": [sample._asdict() for sample in facts.samples],
    }  # fmt: skip


def _slope_json(found: Slope | None) -> dict[str, float] | None:
    return None if found is None else {"bytes_per_request": found.each, "margin": found.margin, "requests": found.span}


def _trend_json(values: Sequence[float]) -> dict[str, float] | None:
    trend = Trend.of(values)
    return None if trend is None else {"first": trend.first, "last": trend.last, "ratio": trend.ratio}
