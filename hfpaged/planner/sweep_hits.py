"""What a trace would find in the prefix cache by the size of the pool, and what more of it is worth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import USUAL_SEQUENCES
from hfpaged.planner.fit import Fit, fit
from hfpaged.planner.layout import PoolLayout
from hfpaged.planner.miss_ratio import MissRatioCurve, miss_ratio_curve
from hfpaged.planner.trace import Trace
from hfpaged.planner.units import binary

POINTS = 128  # of the curve that is drawn
WORTH_IT = 0.005  # a share of hits below which nobody buys memory


@dataclass(frozen=True)
class HitsByPool:
    """`pool` bytes are the plan's own, of which each token takes `token_bytes`; `others` are the same for other KV
    formats. `replayed`: what replays with so many bytes have found. Ratios are shares of the prompts' tokens.
    """

    curve: MissRatioCurve = field(repr=False)
    pool: int
    kv_format: str
    token_bytes: float
    beside: int = 0
    others: dict[str, float] = field(default_factory=dict)
    replayed: dict[int, float] = field(default_factory=dict)

    def at(self, pool: int, token_bytes: float | None = None) -> float:
        """Hits with a pool of so many bytes."""
        tokens = max(0, pool - self.beside) / (token_bytes or self.token_bytes)
        return self.curve.hit_ratio(int(tokens // self.curve.chunk))

    @property
    def enough(self) -> int:
        """Bytes of the smallest pool that finds all that comes again."""
        return int(self.curve.enough * self.curve.chunk * self.token_bytes) + self.beside

    def holding(self, share: float) -> int:
        """Bytes of the smallest pool that finds this share of all that comes again."""
        wanted = share * self.curve.hit_tokens(self.curve.enough)
        chunks = bisect_left(range(self.curve.enough), wanted, key=self.curve.hit_tokens)
        return int(chunks * self.curve.chunk * self.token_bytes) + self.beside

    def sizes(self) -> list[int]:
        """Pools for a table: parts and multiples of the own one, and the one that is enough."""
        own = own_sizes(self.pool)
        return sorted({*own, self.enough} if self.enough else {*own})

    def points(self) -> list[int]:
        """Pools for a picture, as far as something happens."""
        end = max(2 * self.pool, int(1.1 * self.holding(0.98)))
        return [end * step // POINTS for step in range(POINTS + 1)]

    def more(self) -> tuple[int, float] | None:
        """The smallest power of two of bytes that brings half of what is still to be had, and the hits with it."""
        now = self.at(self.pool)
        missing = self.curve.most - now
        if missing < WORTH_IT:
            return None
        extra = 1 << max(20, (self.pool // 16).bit_length())
        while self.at(self.pool + extra) < now + missing / 2:
            extra *= 2
        return extra, self.at(self.pool + extra)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        more = self.more()
        return {
            "pool_bytes": self.pool,
            "token_bytes": self.token_bytes,
            "piece_tokens": self.curve.chunk,
            "hit_ratio": self.at(self.pool),
            "most_hit_ratio": self.curve.most,
            "enough_pool_bytes": self.enough,
            "more": None if more is None else {"bytes": more[0], "hit_ratio": more[1]},
            "curve": [{"pool_bytes": size, "miss_ratio": 1 - self.at(size)} for size in self.points()],
            "replayed": [{"pool_bytes": size, "hit_ratio": ratio} for size, ratio in self.replayed.items()],
            "formats": {name: self.at(self.pool, size) for name, size in self.others.items()},
        }


def own_sizes(pool: int) -> list[int]:
    """Parts and multiples of a pool."""
    return [pool * quarters // 4 for quarters in (1, 2, 4, 8, 16)]


def hits_by_pool(trace: Trace, found: Fit, told: Callable[[int], None] | None = None) -> HitsByPool:
    """For the model and the choices of `found`. Raises InvalidConfigError where no prefix can be found again."""
    if found.layout.state_bytes:
        raise InvalidConfigError(
            f"{found.case.sizes.facts.name} keeps a state for each sequence, so that no prefix is shared, and its "
            "pool has no hits; leave --replay out of --sweep"
        )
    if not trace.has_hashes:
        raise InvalidConfigError(
            "the trace does not say which prompts begin alike, so that it has no hits to be counted; record it with "
            "`hfpaged serve --record`, or give each request its hashes"
        )
    curve = miss_ratio_curve(trace, told, block_size=found.layout.block_size)
    beside = USUAL_SEQUENCES * found.layout.residual_bytes
    sizes = _token_bytes(found.layout)
    return HitsByPool(curve, found.pool, found.case.choices.kv_format, sizes, beside, _others(found))


def sentences(hits: HitsByPool) -> Iterator[str]:
    """What the curve says to whoever pays for memory."""
    now, more = hits.at(hits.pool), hits.more()
    yield f"a pool of {binary(hits.pool)} finds {now:.1%} of the prompts' tokens, one without end {hits.curve.most:.1%}"
    if more is None:
        yield f"more would give no more hits: {binary(hits.enough)} hold all that comes again"
    else:
        extra, then = more
        yield f"{binary(extra)} more would give +{100 * (then - now):.1f} % hits ({now:.1%} to {then:.1%})"
    for name, size in hits.others.items():
        then = hits.at(hits.pool, size)
        if then - now >= WORTH_IT:
            yield f"{name} in the same pool would give +{100 * (then - now):.1f} % hits ({now:.1%} to {then:.1%})"


def _others(found: Fit) -> dict[str, float]:
    sizes = {}
    for name in ("int8", "int4"):
        try:
            sizes[name] = _token_bytes(fit(found.case.choosing(kv_format=name)).layout)
        except InvalidConfigError:  # a format that the model's heads cannot take has no line in the curve
            continue
    return sizes


def _token_bytes(layout: PoolLayout) -> float:
    """Of one token in all layer groups, where no window has passed it."""
    return layout.block_bytes * len(layout.windows) / layout.block_size
