"""How rules are registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Reading

# A rule may raise Lacks: then it is not judged.
Rule = Callable[[Reading], Finding | None]


def name_of(rule: Rule) -> str:
    """As it stands in findings."""
    return getattr(rule, "__name__", "").replace("_", "-")


def judge(rule: Rule, reading: Reading) -> Finding | None:
    """What a rule finds, with its name. Raises Lacks."""
    finding = rule(reading)
    return None if finding is None else replace(finding, rule=name_of(rule))
