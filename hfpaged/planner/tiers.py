"""Tiers below a pool: how much of what was computed they keep, and whether bringing it back pays.

Both sides are estimates: an engine measures them and decides by itself. Bringing a token back takes its bytes over the
link; computing it again takes two operations for each weight, as `cost_source.roofline` has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfpaged.errors import InvalidConfigError

if TYPE_CHECKING:
    from hfpaged.planner.case import Machine
    from hfpaged.planner.fit import Fit

# What of a link's rate on its data sheet a copy of many blocks gets, roughly.
LINK_SHARE = 0.8
# GB/s: a card that no table knows, a copy within a machine's memory, and files on an NVMe drive.
UNKNOWN_LINK, MEMORY_COPY, DISK = 16, 20, 2


@dataclass(frozen=True)
class TierPlan:
    """`size` bytes, of one process or (on disk) of all on a machine, that keep `blocks` blocks, `tokens` tokens if no
    layer has a window. Seconds of one token: `back` from the tier, `computed` by the model. `rate` is GB/s, of which
    `origin` says whose number it is.
    """

    name: str
    flag: str
    size: int
    blocks: int
    tokens: int
    rate: float
    origin: str
    back: float
    computed: float

    @property
    def gain(self) -> float:
        """How many times as fast as computing it."""
        return self.computed / self.back if self.back else 0.0

    @property
    def pays(self) -> bool:
        return self.gain > 1

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "tier": self.name, "size_bytes": self.size, "blocks": self.blocks, "tokens": self.tokens,
            "gb_per_second": self.rate, "rate_is": self.origin, "back_token_seconds": self.back,
            "computed_token_seconds": self.computed, "gain": round(self.gain, 3), "pays": self.pays,
        }  # fmt: skip


def tiers(found: Fit) -> list[TierPlan]:
    """Those that were asked for, the faster one first. None for a model without blocks, or whose layers keep a state
    that no tier has. Raises InvalidConfigError for a tier that holds no block.
    """
    choices, layout = found.case.choices, found.layout
    if not layout.windows or layout.state_bytes:
        return []
    link, origin = _link(found.case.machine)
    rates = [
        ("host memory", "--swap-space", choices.swap_space, link, origin),
        ("disk", "--prefix-store-size", choices.store_size, min(DISK, link), "an estimate for NVMe drives"),
    ]
    return [_tier(found, *each) for each in rates if each[2]]


def _tier(found: Fit, name: str, flag: str, size: int, rate: float, origin: str) -> TierPlan:
    from hfpaged.planner.cost_source import roofline

    layout, cost = found.layout, roofline(found)
    blocks = size // layout.block_bytes
    if not blocks:
        raise InvalidConfigError(
            f"{flag} {size}: so many bytes hold no block, of which one takes {layout.block_bytes}; give more, or leave "
            "it out"
        )
    tokens = blocks // len(layout.windows) * layout.block_size
    # Weights that the plan quantizes are fewer bytes to read, and as many to multiply with.
    plain = found.case.sizes.weights(replace(found.case.choices, weights_dtype=None)).bytes
    computed = cost.prefill * plain / max(found.weights.bytes, 1)
    return TierPlan(name, flag, size, blocks, tokens, rate, origin, cost.token_bytes / (rate * 1e9), computed)


def _link(machine: Machine) -> tuple[float, str]:
    """GB/s between host memory and the device."""
    if machine.is_cpu:
        return MEMORY_COPY, "an estimate for copies within memory"
    if machine.link is None:
        return UNKNOWN_LINK, "a guess for this device"
    return LINK_SHARE * machine.link, f"{LINK_SHARE:.0%} of the link's {machine.link} GB/s, an estimate"
