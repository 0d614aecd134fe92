"""How many requests fit by their length and the KV format, all that a device has to offer at one look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import Case, Workload
from hfpaged.planner.fit import Fit, fit

FORMATS = ("auto", "fp8_e4m3", "int8", "k8v4", "int4")
SHORTEST, LONGEST = 512, 131_072  # tokens of a context, where the model takes more


@dataclass(frozen=True)
class Concurrency:
    """`counts` by format: the requests that fit at once, for each of `contexts` tokens. `left_out`: formats that the
    model cannot have, and why.
    """

    contexts: tuple[int, ...]
    counts: Mapping[str, tuple[int, ...]]
    left_out: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def concurrency(found: Fit) -> Concurrency:
    """For the machine and the choices of `found`. Raises InvalidConfigError where no format is left."""
    contexts = contexts_of(found)
    counts: dict[str, tuple[int, ...]] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys((found.case.choices.kv_format, *FORMATS)):
        try:
            counts[name] = tuple(_count(found.case.choosing(kv_format=name), tokens) for tokens in contexts)
        except InvalidConfigError as error:
            left_out[name] = str(error)
    if not counts:
        raise InvalidConfigError(f"no KV format can be stored for this model: {next(iter(left_out.values()))}")
    return Concurrency(contexts, counts, left_out)


def contexts_of(found: Fit) -> tuple[int, ...]:
    """Powers of two up to what the model is made for, that itself, and the plan's own context."""
    most = min(found.limit, max(LONGEST, found.case.workload.context))
    powers = [SHORTEST << shift for shift in range(20) if SHORTEST << shift <= most]
    return tuple(sorted({*powers, min(most, found.limit), min(found.case.workload.context, most)}))


def _count(case: Case, tokens: int) -> int:
    """Requests that are full of `tokens` tokens."""
    asked = case.workload
    workload = Workload(
        prompt=tokens, output=0, context=tokens, shared_prefix=min(asked.shared_prefix, tokens), encoder=asked.encoder
    )
    return max(0, fit(replace(case, workload=workload)).sequences)
