"""What `prepack` did to a model, as a record and as one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hfpaged.prepack_gain import LinearGain


@dataclass(frozen=True)
class PrepackReport:
    """What of a model lies in oneDNN's order now.

    Attributes:
        layers: linear layers whose weights do.
        nbytes: of these weights.
        copied_nbytes: of those among them beside which the plain weight stays, for an embedding.
        skipped: why others do not, and how many of each.
        gains: what was measured at packing.
    """

    layers: int = 0
    nbytes: int = 0
    copied_nbytes: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    gains: tuple[LinearGain, ...] = ()

    def gain(self, rows: int) -> float:
        """How many times faster the packed layers together are with so many rows, as measured; 1 without any.

        Raises KeyError for rows that were not measured.
        """
        times = [(gain.layers, gain.at(rows)) for gain in self.gains if gain.layers]
        after = sum(layers * time.packed for layers, time in times)
        return sum(layers * time.plain for layers, time in times) / after if times else 1.0

    def __str__(self) -> str:
        told = f"{self.layers} linear layers in oneDNN's order ({self.nbytes / 1e6:.0f} MB"
        told += f", {self.copied_nbytes / 1e6:.0f} MB of it beside the plain weights)" if self.copied_nbytes else ")"
        used = [gain for gain in self.gains if gain.layers]
        if used:
            told += "; gain by rows: " + ", ".join(f"{t.rows}: {self.gain(t.rows):.2f}x" for t in used[0].times)
        return "; ".join([told, *(f"{count} stay plain: {reason}" for reason, count in self.skipped.items())])
