"""What the user of a cache or an engine says of the tiers below its pool."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hfpaged.config import DEFAULT_STORE_SIZE


@dataclass(frozen=True)
class TiersSpec:
    """`swap_space` of host memory, and the prefix store below it."""

    swap_space: int | str = 0
    prefix_store: str | os.PathLike[str] | None = None
    prefix_store_size: int | str = DEFAULT_STORE_SIZE

    @property
    def said(self) -> str | None:
        """What of it was asked for, as it was written, None for nothing."""
        if self.swap_space:
            return f"swap_space={self.swap_space!r}"
        return None if self.prefix_store is None else f"prefix_store={os.fspath(self.prefix_store)!r}"


NO_TIERS = TiersSpec()
