"""One way to run a server: the sizes that a replay is made with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfpaged.config import check_block_size, check_num_blocks, format_bytes
from hfpaged.engine.pacing import DEFAULT_STRETCH
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.layout import PoolLayout

# By the longest known prefix, as `hfpaged serve --replicas`; or to each replica in turn, for comparison.
_CHOSEN = {"prefix": "by prefix", "in-turn": "in turn"}
ROUTERS = tuple(_CHOSEN)


@dataclass(frozen=True)
class Variant:
    """Sizes as ContinuousBatcher takes them. `windows` by layer group, None for full attention. `rate`: arrivals come
    so many times as fast as in the trace. `max_num_queued_requests`: beyond those that run so many may wait, others are
    refused; None: nobody is. `max_step_stretch` None: prompts are not paced. Bytes are 0 where they are not known.
    All sizes are those of one of `replicas`, among which `router` chooses: one of ROUTERS.
    """

    num_blocks: int
    block_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 4096
    max_num_queued_requests: int | None = 1024
    max_step_stretch: float | None = DEFAULT_STRETCH
    prefix_sharing: bool = True
    watermark: float = 0.01
    by_priority: bool = False
    rate: float = 1.0
    kv_format: str = "auto"
    block_bytes: int = 0
    window: int | None = None  # that was asked for, besides the model's own
    replicas: int = 1
    router: str = "prefix"

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        check_num_blocks(self.num_blocks, max(len(self.windows), 1))
        if not self.windows:
            raise InvalidConfigError("a model without a layer that keeps keys and values has no pool to be replayed")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfigError(
                f"max_num_seqs={self.max_num_seqs} with max_num_batched_tokens={self.max_num_batched_tokens}: each "
                "sequence may want one token of a step; use at least 1, and as many tokens as sequences"
            )
        if self.replicas < 1 or self.router not in ROUTERS:
            raise InvalidConfigError(
                f"replicas={self.replicas} with router={self.router!r}: use 1 replica or more, and one of "
                f"{', '.join(ROUTERS)}"
            )
        if not self.rate > 0:
            raise InvalidConfigError(f"rate={self.rate} is no speed of arrivals; use more than 0, 1 as in the trace")

    @property
    def token_bytes(self) -> float:
        """Of one token in all layers, where no window has passed it."""
        return self.block_bytes * len(self.windows) / self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def pool_tokens(self) -> int:
        """That fit if no layer had a window."""
        return self.num_blocks // len(self.windows) * self.block_size

    def with_rate(self, rate: float) -> Variant:
        return replace(self, rate=rate)

    def title(self) -> str:
        """For people."""
        size = f"{format_bytes(self.pool_bytes)} in " if self.block_bytes else ""
        window = f", window {self.window}" if self.window else ""
        several = f"{self.replicas} replicas, {_CHOSEN[self.router]}, each " if self.replicas > 1 else ""
        return (
            f"{several}{self.kv_format}{window}, {size}{self.num_blocks} blocks of {self.block_size}, at most "
            f"{self.max_num_seqs} sequences and {self.max_num_batched_tokens} tokens a step"
        )


def variant_of(layout: PoolLayout, pool_bytes: int, max_num_seqs: int = 128, **sizes: object) -> Variant:
    """A pool of this layout in so many bytes, less what `max_num_seqs` sequences keep outside of blocks. Where layers
    keep a state, prefixes cannot be shared. Raises InvalidConfigError where nothing fits.
    """
    beside = max_num_seqs * (layout.state_bytes + layout.residual_bytes)
    left = pool_bytes - beside
    if layout.block_bytes <= 0:
        raise InvalidConfigError("this model keeps no keys and values in blocks: there is no pool to be replayed")
    if left < layout.block_bytes * len(layout.windows):
        raise InvalidConfigError(
            f"a pool of {format_bytes(pool_bytes)} has no room for a block of {format_bytes(layout.block_bytes)} in "
            f"each of {len(layout.windows)} layer groups, beside {format_bytes(beside)} that {max_num_seqs} sequences "
            "keep outside of it; give the pool more, or use a smaller max_num_seqs"
        )
    told = {"prefix_sharing": not layout.state_bytes} | sizes
    return Variant(
        left // layout.block_bytes, layout.block_size, layout.windows, max_num_seqs, kv_format=layout.kv_format,
        block_bytes=layout.block_bytes, **told,  # type: ignore[arg-type]
    )  # fmt: skip
