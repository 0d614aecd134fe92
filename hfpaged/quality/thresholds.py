"""What a format has to keep to be fit, and what this project promises of its own formats on the demo model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfpaged.quality.limits import LIMITS, Miss, missed, percent

if TYPE_CHECKING:
    from hfpaged.quality.figures import Figures


@dataclass(frozen=True)
class Thresholds:
    """Shares as parts of 1, KL in nats; None: that figure does not decide. Figures count as they were measured, as
    their standard errors are.
    """

    max_ppl_change: float | None = 0.01
    max_kl: float | None = 0.02
    min_top1: float | None = 0.93
    min_rouge_l: float | None = None

    @classmethod
    def only(cls, limits: Mapping[str, float]) -> Thresholds:
        """These, by their names here, and no other."""
        none: dict[str, float | None] = {limit.threshold: None for limit in LIMITS}
        return cls(**none | dict(limits))

    def misses(self, figures: Figures) -> list[Miss]:
        """What is not good enough. A figure that is no number misses."""
        found = (missed(limit, getattr(self, limit.threshold), figures) for limit in LIMITS)
        return [one for one in found if one is not None]


@dataclass(frozen=True)
class Target:
    """Of a format on the demo model: at most these bytes against bfloat16, this rise of perplexity, at least this
    top-1 agreement; parts of 1.
    """

    max_bytes: float
    max_ppl_change: float
    min_top1: float

    def missed(self, figures: Figures) -> list[str]:
        """The names of what was not reached."""
        reached = {
            "bytes": figures.of_bfloat16 <= self.max_bytes,
            "perplexity": figures.ppl_change <= self.max_ppl_change,
            "top-1": figures.top1 >= self.min_top1,
        }
        return [name for name, is_reached in reached.items() if not is_reached]

    def __str__(self) -> str:
        return f"{100 * self.max_bytes:g} %, {percent(self.max_ppl_change)}, {100 * self.min_top1:g} %"


# On technical English; a small model on hard text, so that agreement is a strict measure.
DEMO_TARGETS = {
    "int8": Target(0.53, 0.001, 0.97),
    "fp8_e4m3": Target(0.53, 0.004, 0.93),
    "k8v4": Target(0.42, 0.006, 0.93),
    "int4": Target(0.31, 0.02, 0.91),
}


def worst(all_figures: Sequence[Figures]) -> tuple[float, float, float]:
    """Highest rise of perplexity, highest KL, lowest agreement."""
    return (
        max(figures.ppl_change for figures in all_figures),
        max(figures.kl_mean for figures in all_figures),
        min(figures.top1 for figures in all_figures),
    )
