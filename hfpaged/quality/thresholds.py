"""What a format has to keep to be fit, and what this project promises of its own formats on the demo model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfpaged.quality.figures import Figures


@dataclass(frozen=True)
class Thresholds:
    """Shares as parts of 1, KL in nats."""

    max_ppl_change: float = 0.01
    max_kl: float = 0.02
    min_top1: float = 0.93

    def misses(self, figures: Figures) -> list[str]:
        """What is not good enough, in words. A figure that is no number misses."""
        told = []
        if not figures.ppl_change <= self.max_ppl_change:
            told.append(f"perplexity {percent(figures.ppl_change)} is above {percent(self.max_ppl_change)}")
        if not figures.kl_mean <= self.max_kl:
            told.append(f"KL {figures.kl_mean:.2g} is above {self.max_kl:g}")
        if not figures.top1 >= self.min_top1:
            told.append(f"top-1 {100 * figures.top1:.1f} % is below {100 * self.min_top1:g} %")
        return told


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


def share(text: str) -> float:
    """ "0.5%" as a part of 1. The sign must be there: 0.93 could mean either."""
    try:
        if not text.strip().endswith("%"):
            raise ValueError
        return float(text.strip()[:-1]) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share; write a percentage with its sign, such as 0.5%"
        ) from None


def percent(change: float) -> str:
    """A change with its sign: 0.0012 is "+0.12 %"."""
    return f"{100 * change:+.2f} %"


def worst(all_figures: Sequence[Figures]) -> tuple[float, float, float]:
    """Highest rise of perplexity, highest KL, lowest agreement."""
    return (
        max(figures.ppl_change for figures in all_figures),
        max(figures.kl_mean for figures in all_figures),
        min(figures.top1 for figures in all_figures),
    )
