"""All that one `plan --replay` has found, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hfpaged.planner.cost_source import KnownCost
from hfpaged.planner.knee import REFUSED, Knee, serves, takes_off
from hfpaged.planner.outcome import Outcome
from hfpaged.planner.trace import Trace
from hfpaged.planner.units import counted, lasting
from hfpaged.planner.variant import ROUTERS, Variant

FEW = 500  # requests


@dataclass(frozen=True)
class Report:
    """`recorded` is the replay with the sizes of the server that recorded the trace, where they are known."""

    model: str
    name: str
    trace: Trace
    cost: KnownCost
    outcomes: Sequence[Outcome]
    recorded: Outcome | None
    knee: Knee | None
    was_interrupted: bool
    left_out: Sequence[str] = ()  # of what was chosen

    def about(self) -> Iterator[str]:
        """What was replayed, and what a step is taken to cost."""
        trace, cost = self.trace, self.cost.cost
        yield (
            f"{self.name}: {len(trace.requests):,} requests in {trace.seconds:,.0f} s, {trace.prompt_tokens:,} tokens "
            f"of prompts and {trace.output_tokens:,} of answers; model {self.model}"
        )
        yield (
            f"a step takes {lasting(cost.step)} + {lasting(cost.prefill)} a prompt token + {lasting(cost.decode)} a "
            f"sequence that decodes + {lasting(cost.context)} a stored token read ({cost.source})"
        )
        fit = self.cost.fit
        if fit is not None:
            yield (
                f"the cost explains {fit.r2:.1%} of the variance of {fit.steps:,} measured steps; half of them are "
                f"within {fit.median_error:.1%}"
                + (f" ({fit.left_out:,} far off were left out)" if fit.left_out else "")
            )

    def notes(self) -> Iterator[str]:
        """What whoever reads the figures must know."""
        yield from self.left_out
        skipped = self.trace.skipped
        if skipped.count:
            shown = "; ".join(f"line {line}: {reason}" for line, reason in skipped.first)
            lines = counted(skipped.count, "line")
            yield f"{lines} of the trace could not be read, left out ({shown})"
        if self.cost.assumed:
            yield "no step was measured: compare variants with each other, and take no time for granted; see --cost"
        if not self.trace.has_hashes:
            yield "the trace does not say which prompts begin alike (no hashes): hits are 0 here, and may not be"
        for outcome in self.outcomes:
            if outcome.refused or outcome.too_long:
                yield (
                    f"{outcome.variant.title()}: {outcome.refused:,} requests found a full queue, and "
                    f"{outcome.too_long:,} can never fit"
                )
        if self.knee is not None and len(self.trace.requests) < FEW:
            yield f"the knee was looked for with {len(self.trace.requests):,} requests, which may not fill a queue"
        if self.recorded is not None:
            yield self._against_recording(self.recorded)

    def verdict(self) -> str:
        """The one last line."""
        if self.was_interrupted:
            return "interrupted: figures are of what was replayed until then"
        best = best_of(self.outcomes)
        words = [f"best of {len(self.outcomes)}: {best.variant.title()}"] if len(self.outcomes) > 1 else []
        words += self._smallest()
        words.append(str(self.knee) if self.knee is not None else _state(best))
        return "; ".join(words)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        trace, fit = self.trace, self.cost.fit
        return {
            "model": self.model,
            "trace": {
                "name": self.name, "requests": len(trace.requests), "seconds": trace.seconds,
                "prompt_tokens": trace.prompt_tokens, "output_tokens": trace.output_tokens,
                "chunk": trace.chunk, "skipped": trace.skipped.count,
                "skipped_first": [{"line": line, "reason": reason} for line, reason in trace.skipped.first],
            },
            "cost": self.cost.cost.as_json() | {
                "assumed": self.cost.assumed,
                "fit": None if fit is None else {
                    "steps": fit.steps, "left_out": fit.left_out, "r2": fit.r2, "median_error": fit.median_error,
                },
            },
            "variants": [outcome.as_json() | {"queue_takes_off": takes_off(outcome)} for outcome in self.outcomes],
            "recorded": None if self.recorded is None else self.recorded.as_json(),
            "knee": None if self.knee is None else {
                "fine": self.knee.fine, "off": self.knee.off,
                "requests_per_second": self.knee.requests_per_second,
                "tried": [outcome.as_json() | {"queue_takes_off": takes_off(outcome)} for outcome in self.knee.tried],
            },
            "notes": list(self.notes()),
            "verdict": self.verdict(),
            "interrupted": self.was_interrupted,
        }  # fmt: skip

    def _smallest(self) -> Iterator[str]:
        """Where several pools or numbers of replicas were tried: from which on the queue stays short."""
        if (size := self._least(lambda variant: variant.pool_tokens)) is not None:
            yield f"the queue stays short from a pool of {size:,} tokens on"
        if (count := self._least(lambda variant: variant.replicas)) is not None:
            yield f"the queue stays short from {count} replicas on"

    def _least(self, of: Callable[[Variant], int]) -> int | None:
        """The least that does, where not all do and some."""
        fine: dict[int, bool] = {}
        for outcome in self.outcomes:
            size = of(outcome.variant)
            fine[size] = fine.get(size, False) or serves(outcome)
        if len(fine) < 2 or not any(fine.values()) or all(fine.values()):
            return None
        return min(size for size, ok in fine.items() if ok)

    def _against_recording(self, replayed: Outcome) -> str:
        """Measured and replayed, side by side."""
        known = [request for request in self.trace.requests if request.hits is not None]
        tokens = sum(request.prompt_tokens for request in known)
        words = f"replayed with the sizes of its own server: hits {replayed.hit_rate:.1%}"
        if tokens:
            words += f" (measured {sum(request.hits or 0 for request in known) / tokens:.1%})"
        ttft = sorted(request.ttft for request in self.trace.requests if request.ttft is not None)
        if ttft and replayed.ttft.p50 is not None:
            words += f", TTFT p50 {lasting(replayed.ttft.p50)} (measured {lasting(ttft[len(ttft) // 2])})"
        return words


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Of those without a long queue (if there are any) and with the most tokens, to one in a hundred, one that stores
    keys and values as they are computed, and of these the one whose first tokens come soonest. Routers that are there
    for comparison are none to choose, unless no other was tried.
    """
    real = [outcome for outcome in outcomes if outcome.variant.router == ROUTERS[0]] or list(outcomes)
    short = [outcome for outcome in real if serves(outcome)] or real
    most = max(outcome.output_tokens_per_second for outcome in short)
    able = [outcome for outcome in short if outcome.output_tokens_per_second >= 0.99 * most]
    return min(able, key=lambda outcome: (outcome.variant.kv_format != "auto", outcome.ttft.p99 or 0.0))


def _state(outcome: Outcome) -> str:
    if outcome.too_long > REFUSED * outcome.requests:
        return f"{outcome.too_long:,} of {outcome.requests:,} requests can never fit this pool"
    return "the queue takes off at the rate of the trace" if takes_off(outcome) else "the queue stays short"


def sample(trace: Trace, count: int) -> Trace:
    """The first `count` requests."""
    return Trace(trace.requests[:count], trace.chunk, trace.skipped, trace.steps, trace.header, trace.runs)
