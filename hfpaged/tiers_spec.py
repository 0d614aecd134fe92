"""What the user of a cache or an engine says of the tiers below its pool."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hfpaged.config import DEFAULT_STORE_SIZE
from hfpaged.errors import InvalidConfigError


@dataclass(frozen=True)
class TiersSpec:
    """`swap_space` of host memory, and the prefix store below it. Raises InvalidConfigError."""

    swap_space: int | str = 0
    prefix_store: str | os.PathLike[str] | None = None
    prefix_store_size: int | str = DEFAULT_STORE_SIZE

    def __post_init__(self) -> None:
        if self.prefix_store is not None and not os.fspath(self.prefix_store):
            raise InvalidConfigError('prefix_store="" names no directory; leave it out, or name one ("." is this one)')

    def check_shared(self, prefix_sharing: bool) -> None:
        """Raises InvalidConfigError where prefixes are kept that nobody would look for."""
        if self.said and not prefix_sharing:
            raise InvalidConfigError(
                f"{self.said} keeps prefixes that were evicted, those of preempted requests among them, and with "
                "prefix_sharing=False none is known; leave one of the two out"
            )

    @property
    def said(self) -> str | None:
        """What of it was asked for, as it was written, None for nothing."""
        if self.swap_space:
            return f"swap_space={self.swap_space!r}"
        return None if self.prefix_store is None else f"prefix_store={os.fspath(self.prefix_store)!r}"


NO_TIERS = TiersSpec()
