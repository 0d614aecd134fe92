"""The nodes of the prefix index's trees: roots, and the full blocks of tokens below them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from hfpaged.block_hash import ExtraKey
from hfpaged.block_table import GONE


class Origin:
    """Who computed a block: a request or a call of generate(), told apart by identity. It lives as long as one of its
    blocks is known.
    """

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Origin({self.name!r})"


class Root:
    """Where the chains of one set of extra keys begin. `width`: numbers that describe one position."""

    def __init__(self, keys: tuple[ExtraKey, ...], width: int, digest: bytes) -> None:
        self.keys, self.width, self.digest = keys, width, digest
        self.children: dict[bytes, PrefixBlock] = {}
        self.last_use = 0

    def value(self, kind: str) -> str | None:
        """The value of the extra key of that kind, None where it has none."""
        return next((key.value for key in self.keys if key.kind == kind), None)


class PrefixBlock:
    """A full block of tokens under its parent. `blocks` has one block id per layer group, GONE where that group's
    block was evicted, at `evicted_at`, or had left its window before it was published. `number` counts on. `origin` is
    who computed it, None where nobody has said. `below` is the place in host memory by layer group, of those whose
    contents lie there.
    """

    __slots__ = ("below", "blocks", "children", "digest", "evicted_at", "items", "number", "origin", "parent", "root")

    def __init__(
        self, parent: PrefixBlock | Root, digest: bytes, items: array[int], num_groups: int, number: int
    ) -> None:
        self.parent, self.digest, self.items, self.number = parent, digest, items, number
        self.root: Root = parent if isinstance(parent, Root) else parent.root
        self.blocks = [GONE] * num_groups
        self.children: dict[bytes, PrefixBlock] = {}
        self.evicted_at: float | None = None
        self.origin: Origin | None = None
        self.below: dict[int, int] | None = None  # most have none, and there are many

    @property
    def is_gone(self) -> bool:
        """Whether no layer group has its block any more, nor its contents."""
        return not self.below and max(self.blocks, default=GONE) == GONE  # ids are 0 or more


class BlockWatcher(Protocol):
    """Told of each published block that comes and goes, in the order in which that happens, while the pool changes: it
    returns soon, raises nothing and changes no block.
    """

    def stored(self, entry: PrefixBlock, group: int) -> None:
        """Layer group `group` of `entry` has a block now."""

    def removed(self, entry: PrefixBlock, group: int, block: int) -> None:
        """It has it no more: `block`, whose contents are still there, will be written next."""


def width_of(parent: PrefixBlock | Root) -> int:
    """Numbers that describe one position, behind a root or a block under it."""
    return parent.width if isinstance(parent, Root) else parent.root.width


def origins(blocks: Iterable[PrefixBlock]) -> tuple[Origin, ...]:
    """Who computed them, each once, as far as that is known."""
    return tuple(dict.fromkeys(block.origin for block in blocks if block.origin is not None))
