"""What lies below a pool: where the contents of evicted blocks go, and from where they come back.

    pool's blocks  --evicted-->  host tier (swap_space)  --its oldest-->  a tier below it, on disk say
                   <--restored, into new blocks of the pool, when that is cheaper than computing--

A block's contents travel as one row of bytes (`BlockRows` knows what lies where in it).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from hfpaged.prefix_block import PrefixBlock, Root


class Tier(Protocol):
    """Keeps the contents of evicted blocks, within bounds of its own, by what they are of: the tokens of a block and of
    all blocks before it, below a root. An entry says that (`items`, `digest`, `parent`, `root`); it may be one that no
    index knows, made to ask.

    All is called under the lock of the pool, so it returns soon, and by several threads, one at a time. Nothing is
    ever raised but by `check_integrity`: what cannot be kept or read is not there.
    """

    @property
    def has_read(self) -> bool:
        """Whether all that `find` finds now was read before it was asked for."""

    def wants(self, entry: PrefixBlock, group: int) -> bool:
        """Whether `put` would keep a block that is not there yet."""

    def put(self, entry: PrefixBlock, group: int, row: Tensor) -> None:
        """Keep what the block of layer group `group` of `entry` held: `row`, uint8 [bytes] in host memory, which is
        another's as soon as this returns. What is there already stays.
        """

    def find(self, entry: PrefixBlock) -> Collection[int]:
        """The layer groups whose blocks of `entry` can be read; empty where the tokens or those before them are
        others than what is kept under this hash.
        """

    def read(self, entry: PrefixBlock, group: int, row: Tensor) -> bool:
        """Copy into `row`, uint8 [bytes], what `find` has found; False where it is gone or damaged by now, whatever
        `row` holds then.
        """

    def prepare(self, root: Root, items: array[int], limit: int) -> None:
        """A prompt of a pool that has seen no key will be looked up: give its layers their stores, where it is known
        here what they keep. Not under the lock of the pool. Raises InvalidConfigError where the pool's memory holds no
        block.
        """

    def used(self, entries: Iterable[PrefixBlock]) -> None:
        """A prompt begins with these, which are in the pool."""

    def fetch(self, wanted: Iterable[tuple[PrefixBlock, int]]) -> bool:
        """Begin to read blocks of layer groups ahead, if that is done here; whether any of them is under way, which is
        worth waiting for.
        """

    def looking_ahead(self) -> AbstractContextManager[None]:
        """What can be fetched is found as well."""

    def wait(self, seconds: float) -> None:
        """Until all that is under way has come, at most so long. Not under the lock of the pool."""

    @property
    def holds(self) -> tuple[int, int]:
        """(files or the like, bytes) that are there by now, as far as it is known."""

    def read_ahead(self) -> None:
        """From now on `fetch` is called before anything is wanted, and only what it has read is found."""

    def settle(self, seconds: float) -> None:
        """Wait until what was put here is safe, at most so long. Not under the lock of the pool."""

    def clear(self) -> None:
        """The pool forgets its prefixes: forget those that belong to nobody else."""

    def check_integrity(self) -> None:
        """Recount what is kept. Raises IntegrityError."""
