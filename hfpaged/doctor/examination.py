"""One reading, all rules."""

from __future__ import annotations

import math
from collections.abc import Callable

from hfpaged.doctor import derived
from hfpaged.doctor.findings import Diagnosis, Finding
from hfpaged.doctor.reading import Lacks, Reading
from hfpaged.doctor.rules import RULES
from hfpaged.doctor.rules.fragmentation import block_waste
from hfpaged.doctor.rules.rule import judge, name_of
from hfpaged.doctor.words import duration, number, percent, plural
from hfpaged.telemetry.catalog import BY_NAME

FIRST_TOKEN, BETWEEN = "hfpaged_time_to_first_token_seconds", "hfpaged_inter_token_latency_seconds"
FIGURES: dict[str, Callable[[Reading], float | None]] = {
    "requests_ended": derived.ended,
    "generate_calls": lambda reading: derived.calls(reading) or None,
    "requests_running": lambda reading: reading.total("hfpaged_requests_running"),
    "requests_waiting": lambda reading: reading.total("hfpaged_requests_waiting"),
    "pool_use": derived.use,
    "pool_use_now": derived.use_now,
    "sequence_tokens_mean": lambda reading: reading.histogram("hfpaged_sequence_tokens").mean or None,
    "block_waste": block_waste,
    "hit_rate": derived.hit_rate,
    "tokens_per_second": derived.tokens_per_second,
    "first_token_p50_seconds": lambda reading: reading.histogram(FIRST_TOKEN).quantile(0.5),
    "first_token_p95_seconds": lambda reading: reading.histogram(FIRST_TOKEN).quantile(0.95),
    "between_tokens_p50_seconds": lambda reading: reading.histogram(BETWEEN).quantile(0.5),
    "between_tokens_p95_seconds": lambda reading: reading.histogram(BETWEEN).quantile(0.95),
}


def examine(reading: Reading) -> Diagnosis:
    """Judge by all rules; one that lacks a metric is listed as not judged."""
    found: list[Finding] = []
    not_judged: dict[str, str] = {}
    for rule in RULES:
        try:
            finding = judge(rule, reading)
        except Lacks as lacks:
            not_judged[name_of(rule)] = str(lacks)
            continue
        if finding is not None:
            found.append(finding)
    figures = _figures(reading)
    is_sure = figures.get("requests_ended", 0.0) + figures.get("generate_calls", 0.0) >= derived.ENOUGH_REQUESTS
    return Diagnosis(
        found, model_name=reading.model_name, summary=_summary(reading, figures), figures=figures,
        not_judged=not_judged, is_sure=is_sure,
    )  # fmt: skip


def _figures(reading: Reading) -> dict[str, float]:
    """Those that can be told."""
    figures = {}
    for name, figure in FIGURES.items():
        try:
            value = figure(reading)
        except Lacks:
            continue
        if value is not None and math.isfinite(value):  # JSON has no others
            figures[name] = value
    return figures


def _summary(reading: Reading, figures: dict[str, float]) -> dict[str, str]:
    """The figures in words, several of a kind in one line."""
    span = "since it began" if reading.seconds is None else f"in {duration(reading.seconds)}"
    parts = {
        "requests": (
            ("requests_ended", lambda n: f"{plural(n, 'request')} ended {span}"),
            ("generate_calls", lambda n: f"{plural(n, 'call')} of generate() ended {span}"),
            ("requests_running", lambda n: f"{number(n)} running"),
            ("requests_waiting", lambda n: f"{number(n)} waiting"),
        ),
        "pool": (
            ("pool_use", lambda share: f"{percent(share)} full while there is work"),
            ("pool_use_now", lambda share: f"{percent(share)} now"),
        ),
        "sequences": (
            ("sequence_tokens_mean", lambda n: f"{number(n)} tokens on average at their ends"),
            ("block_waste", lambda share: f"{percent(share)} of the slots in their blocks empty"),
        ),
        "prefixes": (("hit_rate", lambda share: f"{percent(share)} of prompt tokens found"),),
        "first token": _quantiles("first_token", FIRST_TOKEN),
        "next tokens": _quantiles("between_tokens", BETWEEN),
        "output": (("tokens_per_second", lambda rate: f"{number(rate)} tokens/s of work"),),
    }
    told = {
        line: ", ".join(say(figures[name]) for name, say in pieces if name in figures) for line, pieces in parts.items()
    }
    return {line: text for line, text in told.items() if text}


def _quantiles(what: str, name: str) -> tuple[tuple[str, Callable[[float], str]], ...]:
    """Of what lies beyond the last bound it is known that it does."""
    last = BY_NAME[name].buckets[-1]
    over = {True: "over ", False: ""}
    return (
        (f"{what}_p50_seconds", lambda seconds: f"p50 {over[seconds >= last]}{duration(seconds)}"),
        (f"{what}_p95_seconds", lambda seconds: f"p95 {over[seconds >= last]}{duration(seconds)}"),
    )
