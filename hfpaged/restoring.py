"""Bringing blocks back from the tiers below a pool, as the beginning of one prompt."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from hfpaged.block_table import GONE, BlockTable
from hfpaged.host_tier import PENDING
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import Match
from hfpaged.restore_costs import Source
from hfpaged.restore_plan import Reachable, RestorePlan, Wanted

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool
    from hfpaged.swapping import Swapping

# Rows that are on their way from or to a tier that is not in host memory, at once.
STAGED = 64

logger = logging.getLogger("hfpaged")


class Restoring:
    """The first `limit` tokens of `items` under `root`, as far as they are in the pool or below it."""

    def __init__(self, pool: KVPool, swapping: Swapping, root: Root, items: array[int], limit: int) -> None:
        self._pool, self._swapping, self._host = pool, swapping, swapping.host
        self._root, self._items, self._limit = root, items, limit
        windows = [group.window for group in pool.groups]
        self._reach = Reachable(pool.prefixes.index, windows, root, items, limit, self._find)

    def length(self, match: Match) -> int:
        """How many tokens will be known, where `match` is what is known in the pool."""
        plan = self._plan(match)
        return match.length(self._pool.block_size) if plan is None else plan.length * self._pool.block_size

    def below(self, match: Match, anyway: bool) -> list[tuple[PrefixBlock, int]]:
        """What is to be read from the tier below host memory because that pays, or `anyway`."""
        plan = self._plan(match) or (self._reach.plan(self._pool.blocks.num_free) if anyway else None)
        wanted = plan.wanted if plan else ()
        return [(plan.chain[one.number], one.group) for one in wanted if plan and self._source(plan, one) == "below"]

    def bring(self, match: Match, holder: BlockTable) -> Match:
        """What is known when what pays has come back. The empty table `holder` keeps its blocks from eviction."""
        for block in self._reach.blocks:
            holder.hold(block)
        try:
            plan = self._plan(match, counts=True)
            if plan is None:
                return match
            self._restore(plan, holder)
        except (RuntimeError, MemoryError):
            if not self._swapping.has_failed:
                logger.exception("blocks could not be brought back, and are computed again (said once)")
            self._swapping.has_failed = True
        size = self._pool.block_size
        found = self._pool.prefixes.index.match(self._root, self._items, self._limit)
        self._swapping.counts.tokens_in += max(found.length(size) - match.length(size), 0)
        return found

    def _find(self, entry: PrefixBlock) -> Collection[int]:
        groups = {group for group, place in (entry.below or {}).items() if place != PENDING}
        lower = self._swapping.lower
        return groups if lower is None else groups | set(lower.find(entry))

    def _plan(self, match: Match, counts: bool = False) -> RestorePlan | None:
        """What pays, None for nothing: all that has room, or what of it lies in host memory."""
        room = self._pool.blocks.num_free
        plan = self._reach.plan(room)
        if counts and plan.length < self._reach.length:
            self._swapping.counts.short += 1
        if self._gained(plan, match) <= 0 or not self._swapping.rows().nbytes:
            return None
        above = next((one.number for one in plan.wanted if self._source(plan, one) == "below"), plan.length)
        for each in (plan, self._reach.plan(room, above)):
            if self._gained(each, match) > 0 and self._pays(each, match):
                return each
        if not counts:
            return None
        self._swapping.counts.declined += 1
        return plan if self._swapping.costs.is_due() else None

    def _gained(self, plan: RestorePlan, match: Match) -> int:
        """Tokens that need not be computed."""
        return plan.length * self._pool.block_size - match.length(self._pool.block_size) if plan.wanted else 0

    def _pays(self, plan: RestorePlan, match: Match) -> bool:
        sizes: dict[Source, int] = {"host": 0, "below": 0}
        rows, lower = self._swapping.rows(), self._swapping.lower
        for one in plan.wanted:
            sizes[self._source(plan, one)] += rows.bytes_of(one.group)
        if lower is not None and lower.has_read:
            sizes["below"] = 0
        return self._swapping.costs.pays(self._gained(plan, match), sizes)

    def _source(self, plan: RestorePlan, one: Wanted) -> Source:
        return "below" if self._place(plan, one) == PENDING else "host"

    def _place(self, plan: RestorePlan, one: Wanted) -> int:
        return PENDING if self._host is None else self._host.place(plan.chain[one.number], one.group)

    def _restore(self, plan: RestorePlan, holder: BlockTable) -> None:
        """Give what is wanted new blocks, fill them, and let others find them."""
        blocks = dict(zip(plan.wanted, holder.take(len(plan.wanted)), strict=True))
        places = [place for one in plan.wanted if (place := self._place(plan, one)) != PENDING]
        with self._host.reading(places) if self._host else nullcontext():
            self._swapping.flush()  # what made room for them, before it is written over
            self._make_room_in_stores()
            filled = [one for group in range(len(self._pool.groups)) for one in self._fill(plan, blocks, group)]
        self._swapping.counts.blocks_in += len(filled)
        try:
            try:
                self._publish(plan, {one: blocks[one] for one in filled})
            finally:
                self._settle(blocks.values())
        finally:  # Ctrl-C may have come in between, and what the index knows the pool must know too
            self._settle(blocks.values())

    def _make_room_in_stores(self) -> None:
        for stores in self._pool.layer_stores.values():
            for store in stores:
                store.reserve(self._pool.blocks.high_water, self._pool.num_blocks)

    def _fill(self, plan: RestorePlan, blocks: dict[Wanted, int], group: int) -> list[Wanted]:
        """Copy what is wanted of a layer group; those that could be read."""
        wanted = [one for one in plan.wanted if one.group == group]
        here = [one for one in wanted if self._source(plan, one) == "host"]
        if self._host is not None and here:
            self._host.restore(group, [self._place(plan, one) for one in here], [blocks[one] for one in here])
        below = [one for one in wanted if self._source(plan, one) == "below"]
        return here + self._read(plan, blocks, group, below)

    def _read(self, plan: RestorePlan, blocks: dict[Wanted, int], group: int, wanted: list[Wanted]) -> list[Wanted]:
        lower, rows, read = self._swapping.lower, self._swapping.rows(), []
        for start in range(0, len(wanted) if lower is not None else 0, STAGED):
            assert lower is not None
            began, staged = time.perf_counter(), self._swapping.staged()
            few = wanted[start : start + STAGED]
            there = [lower.read(plan.chain[one.number], group, row) for one, row in zip(few, staged, strict=False)]
            places = [place for place, is_there in enumerate(there) if is_there]
            rows.put(group, staged, places, [blocks[few[place]] for place in places])
            rows.settle()  # the next ones are read into the same memory
            if not lower.has_read:
                nbytes = len(few) * rows.bytes_of(group)
                self._swapping.costs.told_copy("below", nbytes, time.perf_counter() - began)
            read += [few[place] for place in places]
        return read

    def _publish(self, plan: RestorePlan, blocks: dict[Wanted, int]) -> None:
        """Up to the first block whose hash is another's by now."""
        index, groups = self._pool.prefixes.index, range(len(self._pool.groups))
        parent: PrefixBlock | Root = index.settled(self._root)
        for number, entry in enumerate(plan.chain):
            own = [blocks.get(Wanted(number, group), GONE) for group in groups]
            known = index.publish(parent, entry.items, own, entry.origin)
            if known is None:
                return
            parent = known

    def _settle(self, blocks: Iterable[int]) -> None:
        """What the index knows is published in the pool."""
        for block in blocks:
            if self._pool.prefixes.index.holds(block):
                self._pool.blocks.publish(block)
