"""The trees of a prefix index as flat lists, which can be written down, and what of such lists a pool takes in."""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from hfpaged.block_hash import ExtraKey
from hfpaged.block_table import GONE
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import PrefixIndex


class Place(NamedTuple):
    """One block: of a node, in a layer group."""

    node: int
    group: int


@dataclass
class FlatTree:
    """All trees, node by node, parents before their children.

    `roots` and `order` begin with the least recently used; `order` has each block that is there. `parents` are -1 for
    the first block behind a root.
    """

    roots: list[tuple[int, tuple[ExtraKey, ...]]] = field(default_factory=list)  # (width, other keys)
    root_of: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    items: list[array[int]] = field(default_factory=list)
    order: list[Place] = field(default_factory=list)

    def rows(self, group: int) -> dict[Place, int]:
        """Where among the blocks of a group each one stands, in the order of `order`."""
        return {place: row for row, place in enumerate(place for place in self.order if place.group == group)}


def flatten(index: PrefixIndex, windows: Many[int | None], cached: Many[int]) -> tuple[FlatTree, list[int]]:
    """All published blocks that can be found, and the pool's ids for `order`. `cached`: those that nobody holds, the
    least recently used first; those in use count as used later than they, the end of a prefix before its beginning.
    """
    tree = FlatTree()
    entries: list[PrefixBlock] = []
    for root in reversed(index.roots):
        found = _findable(root, windows)
        if not found or root.value("hook") is not None:  # hooks are known by numbers of this process
            continue
        width = ExtraKey("width", str(root.width))
        tree.roots.append((root.width, tuple(key for key in root.keys if key != width)))
        numbers = {id(entry): len(entries) + number for number, entry in enumerate(found)}
        entries += found
        tree.root_of += [len(tree.roots) - 1] * len(found)
        tree.parents += [numbers.get(id(entry.parent), -1) for entry in found]
    tree.items = [entry.items for entry in entries]
    ids = {
        block: Place(node, group)
        for node, entry in enumerate(entries)
        for group, block in enumerate(entry.blocks)
        if block != GONE
    }
    free = [block for block in cached if block in ids]
    # Children stand behind their parents, so from the back every end comes before its beginning.
    blocks = free + sorted(ids.keys() - set(free), key=lambda block: -ids[block].node)
    tree.order = [ids[block] for block in blocks]
    return tree, blocks


def _findable(root: Root, windows: Many[int | None]) -> list[PrefixBlock]:
    """The nodes below `root` to which no block of full attention is missing, as far as blocks hang on them."""
    found: list[PrefixBlock] = []
    front: list[PrefixBlock] = list(root.children.values())
    while front:
        front = [entry for entry in front if not _lacks_full(entry, windows)]
        found += front
        front = [child for entry in front for child in entry.children.values()]
    kept: set[int] = set()
    for entry in reversed(found):
        if id(entry) in kept or not entry.is_gone:
            kept |= {id(entry), id(entry.parent)}
    return [entry for entry in found if id(entry) in kept]


def _lacks_full(entry: PrefixBlock, windows: Many[int | None]) -> bool:
    return any(block == GONE for block, window in zip(entry.blocks, windows, strict=True) if window is None)


def known_entries(tree: FlatTree, roots: Many[Root | None], index: PrefixIndex) -> list[PrefixBlock | None]:
    """What of each node an index knows by now; nodes under no root are unknown."""
    entries: list[PrefixBlock | None] = []
    for root, parent, items in zip(tree.root_of, tree.parents, tree.items, strict=True):
        above = roots[root] if parent < 0 else entries[parent]
        entries.append(None if above is None else index.child(above, items))
    return entries


def choose(
    tree: FlatTree, windows: Many[int | None], known: Container[Place], roots: Many[Root | None], room: int
) -> dict[Place, None]:
    """At most `room` blocks that are not `known`: the most recently used first, none of them without the blocks of full
    attention before it. Only nodes under a root that is one.
    """
    full = [group for group, window in enumerate(windows) if window is None]
    there = set(tree.order)
    chosen: dict[Place, None] = {}
    reached: set[int] = set()  # nodes whose blocks of full attention, and those before them, are known or chosen
    for place in reversed(tree.order):
        if len(chosen) == room:
            break
        if place in known or place in chosen or roots[tree.root_of[place.node]] is None:
            continue
        path = _path(tree, place.node, reached)
        before = [Place(node, group) for node in path for group in full if Place(node, group) not in known]
        needed = dict.fromkeys(one for one in (*before, place) if one not in chosen)
        if there.issuperset(before) and len(chosen) + len(needed) <= room:
            chosen |= needed
            reached |= set(path)
    return chosen


def _path(tree: FlatTree, node: int, reached: Container[int]) -> list[int]:
    """The nodes from the first that is not `reached` down to `node`."""
    path = []
    while node >= 0 and node not in reached:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def publish_chosen(
    tree: FlatTree, roots: Many[Root | None], index: PrefixIndex, blocks: Mapping[Place, int], num_groups: int
) -> list[PrefixBlock | None]:
    """Make `blocks` known, with all nodes before them; what became of each node. None: not wanted, or another block
    has its hash.
    """
    wanted: set[int] = set()
    for place in blocks:
        wanted |= set(_path(tree, place.node, wanted))
    entries: list[PrefixBlock | None] = []
    for node, (root, parent) in enumerate(zip(tree.root_of, tree.parents, strict=True)):
        above = roots[root] if parent < 0 else entries[parent]
        ids = [blocks.get(Place(node, group), GONE) for group in range(num_groups)]
        entries.append(index.publish(above, tree.items[node], ids) if above is not None and node in wanted else None)
    return entries
