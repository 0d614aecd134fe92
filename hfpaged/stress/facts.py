"""What a stress run has found, as numbers: all that the verdict and the report are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hfpaged.stress.slope import Slope, slope
from hfpaged.stress.watch import Sample

WARM_UP = 1 / 3  # of the samples: kernels are compiled, and pages of the pool touched first, in there


@dataclass(frozen=True)
class Trend:
    """The median of the first third after the warm-up, and of the last one; None where too few came."""

    first: float
    last: float

    @property
    def ratio(self) -> float:
        return self.last / self.first if self.first else 1.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Trend | None:
        """`values` in the order of time; the first tenth is warm-up."""
        warm = list(values[len(values) // 10 :])
        third = len(warm) // 3
        return cls(median(warm[:third]), median(warm[-third:])) if third >= 10 else None


@dataclass(frozen=True)
class LeakedBlock:
    """A block that is held when nobody is there: by whom, and its last transitions (in debug mode)."""

    block: int
    holders: tuple[str, ...] = ()
    history: tuple[str, ...] = ()

    def __str__(self) -> str:
        held = f"held by {', '.join(self.holders)}; " if self.holders else ""
        return f"block {self.block}: {held}{'; '.join(self.history) or 'no history without --debug'}"


@dataclass(frozen=True)
class Facts:
    """`seconds` are those of the load, of `planned`. Counts as they were made outside of the batcher, and its own."""

    seconds: float
    planned: float
    received: int
    finished: int
    aborted: int
    rejected: int
    failed: int
    in_flight: int
    own_counts: dict[str, float]
    kinds: Counter[str]
    tokens: int
    steps: int
    preemptions: int
    recomputed: float
    peak: float
    full_share: float
    num_blocks: int
    samples: Sequence[Sample]
    first_token: Sequence[float]
    per_token: Sequence[float]
    checked: int
    close: int
    differences: Sequence[str]
    errors: Sequence[str]
    broken: str | None
    leaked: Sequence[LeakedBlock]
    grown: Sequence[tuple[str, int]]
    other_rounds: int
    other_out_of_blocks: int
    stuck: int = 0
    warm: Sequence[Sample] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "warm", self.samples[int(len(self.samples) * WARM_UP) :])

    @property
    def resident(self) -> Slope | None:
        """Bytes of resident memory that each request adds."""
        return self._slope([sample.resident for sample in self.warm])

    @property
    def device(self) -> Slope | None:
        """Bytes of device memory that each request adds; None on CPUs."""
        values = [sample.reserved for sample in self.warm]
        return self._slope(values) if any(values) else None

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def _slope(self, values: Sequence[float]) -> Slope | None:
        return slope([sample.requests for sample in self.warm], values)
