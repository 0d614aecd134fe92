"""The tiers below a pool: what it evicts goes there, and comes back when that is cheaper than computing it."""

from __future__ import annotations

import logging
import time
import weakref
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from hfpaged.block_rows import BlockRows
from hfpaged.config import format_bytes
from hfpaged.device_timer import DeviceTimer
from hfpaged.errors import InvalidConfigError
from hfpaged.host_tier import PENDING, Evicted, HostTier
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import Match
from hfpaged.restore_costs import RestoreCosts
from hfpaged.restoring import STAGED, Restoring
from hfpaged.swap_counts import SwapCounts
from hfpaged.tier import Tier

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool

logger = logging.getLogger("hfpaged")

# Steps of an engine that tell what prompt tokens take: those with so many of them for each sequence that decodes.
MOSTLY_PROMPTS = 8
# What was read ahead so long ago says little of what it would take now.
FETCH_AGAIN_SECONDS = 60.0


class Swapping:
    """What a pool evicts is noted, and copied in one go before the change of the pool that evicted it ends: until then
    nobody writes where it lies. All is called under the lock of the pool.
    """

    def __init__(self, pool: KVPool, size: int) -> None:
        self._pool: KVPool = weakref.proxy(pool)  # which holds this
        index = weakref.proxy(pool.prefixes.index)
        self.counts, self.costs = SwapCounts(), RestoreCosts()
        self.timer = DeviceTimer(self.costs.told_prompt)
        self.host: HostTier | None = HostTier(size, self._lost, lambda entry: index.lost_below(entry)) if size else None
        self.lower: Tier | None = None
        self._rows: BlockRows | None = None
        self._staged: Tensor | None = None
        self._evicted: list[Evicted] = []
        self._marked: list[Evicted] = []
        self._is_forgetting = False
        self._fetched = time.monotonic()
        self.has_failed = False  # and it was said

    @property
    def size(self) -> int:
        """Bytes of host memory that blocks may take."""
        return self.host.size if self.host else 0

    def add(self, lower: Tier) -> None:
        """Let what has no room here go there. Raises InvalidConfigError where there is one already, or other ranks."""
        if self._pool.ranks is not None:
            raise InvalidConfigError(f"a pool of {self._pool.ranks} has no tiers: each would decide what comes back")
        if self.lower is not None:
            raise InvalidConfigError(f"this pool has {self.lower} below it already; a pool has at most one tier there")
        self.lower = lower

    def stored(self, entry: PrefixBlock, group: int) -> None:
        """See BlockWatcher."""

    def removed(self, entry: PrefixBlock, group: int, block: int) -> None:
        """See BlockWatcher: its contents are copied before the change of the pool ends."""
        if self._is_forgetting:
            return
        evicted = Evicted(entry, group, block)
        if self.host is not None:
            if (place := (entry.below or {}).get(group)) is not None:
                if place != PENDING:  # which was evicted before in this very change, and lies there still
                    self.host.renew(place)
                self.counts.blocks_kept += 1
                return
            self._marked.append(evicted)  # so that the index does not forget it meanwhile
            entry.below = (entry.below or {}) | {group: PENDING}
        self._evicted.append(evicted)

    def flush(self) -> None:
        """Copy what was evicted, now: what lies there is about to be written over."""
        if not self._evicted and not self._marked:
            return
        evicted, self._evicted = self._evicted, []  # whatever happens, it is never copied later than now
        try:
            self._keep(evicted)
        except Exception:
            if not self.has_failed:
                logger.exception("evicted blocks could not be kept, and are computed again when needed (said once)")
            self.has_failed = True
        finally:
            self._unmark()

    def rows(self) -> BlockRows:
        """How the contents of the pool's blocks lie in rows. Where it has got other layers since the last time, what
        is kept in host memory is let go.
        """
        pool = self._pool
        if self._rows is None or not self._rows.fits(pool.groups, pool.layer_stores):
            rows = BlockRows(pool.groups, pool.layer_stores, self._put_back)
            self._rows, self._staged = rows, None  # first: where there is no host memory, what is below it is used
            if self.host is not None:
                self.host.open(rows)
        return self._rows

    def staged(self) -> Tensor:
        """[STAGED, bytes]: rows on their way from or to a tier that is not in host memory."""
        if self._staged is None:
            self._staged = self.rows().make(STAGED)
        return self._staged

    def reserve(self) -> None:
        """Take the host memory now. Raises InvalidConfigError where it is not to be had."""
        try:
            self.rows()
        except (RuntimeError, MemoryError) as error:
            raise InvalidConfigError(
                f"swap_space={format_bytes(self.size)} of host memory are not to be had ({error}); give less"
            ) from error

    def check_size(self, block_bytes: int) -> None:
        """Raises InvalidConfigError where `swap_space` is less than a block."""
        if self.host is not None and self.host.size < block_bytes:
            raise InvalidConfigError(
                f"swap_space={self.host.size} bytes hold no block: one takes {block_bytes}; give more, such as "
                "4GiB, or 0 for none"
            )

    def restoring(self, root: Root, items: array[int], limit: int) -> Restoring:
        """To bring more of a prompt back than is in the pool."""
        self.flush()  # what made room for others may be wanted
        return Restoring(self._pool, self, root, items, limit)

    def prepare(self, root: Root, items: Many[array[int]], limits: Many[int]) -> None:
        """Prompts will be looked up, perhaps before the pool has seen a key. Not under its lock."""
        for prompt, limit in zip(items, limits, strict=True):
            if self.lower is not None and not self._pool.layer_stores:
                self.lower.prepare(root, prompt, limit)

    def is_coming(self, root: Root, items: array[int], limit: int, match: Match) -> bool:
        """Whether blocks are being read ahead that are worth waiting for; that is begun here. Where it did not pay for
        a while it is tried again, to measure it.
        """
        if self.lower is None:
            return False
        now = time.monotonic()
        with self.lower.looking_ahead():
            wanted = self.restoring(root, items, limit).below(match, now - self._fetched > FETCH_AGAIN_SECONDS)
        if not (is_coming := self.lower.fetch(wanted)) and wanted:  # it has come
            self._fetched = now
        return is_coming

    def used(self, match: Match) -> None:
        """A prompt begins with what is known of it in the pool."""
        if self.lower is not None:
            self.lower.used(match.blocks)

    def told_step(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """An engine's step took so long."""
        if prompt_tokens and prompt_tokens >= MOSTLY_PROMPTS * decodes:
            self.costs.told_prompt(prompt_tokens, seconds * prompt_tokens / (prompt_tokens + decodes))

    def forgetting(self, drop: Callable[[], int]) -> int:
        """Blocks that are dropped now are wanted by nobody, here as little as in the pool; how many were dropped."""
        self.flush()
        self._is_forgetting = True
        try:
            count = drop() + (self.host.clear() if self.host else 0)
        finally:
            self._is_forgetting = False
        if self.lower is not None:
            self.lower.clear()
        return count

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        self.flush()
        for tier in (self.host, self.lower):
            if tier is not None:
                tier.check_integrity()

    def _keep(self, evicted: list[Evicted]) -> None:
        rows, began = self.rows(), time.perf_counter()
        for group, few in groupby(sorted(evicted, key=lambda each: each.group), key=lambda each: each.group):
            blocks = [each for each in few if self._lacks(each.entry, group)]
            kept = self._store(rows, group, blocks)
            self.counts.blocks_out += kept
            self.counts.blocks_dropped += len(blocks) - kept
            self.counts.bytes_out += kept * rows.bytes_of(group)
        self.counts.seconds_out += time.perf_counter() - began

    def _lacks(self, entry: PrefixBlock, group: int) -> bool:
        """Whether a block is to be copied: what is below may have it by itself."""
        lacks = self.host is not None or self.lower is None or self.lower.wants(entry, group)
        self.counts.blocks_kept += not lacks
        return lacks

    def _store(self, rows: BlockRows, group: int, blocks: list[Evicted]) -> int:
        """Those of one layer group; how many are kept."""
        if self.host is not None:
            return self.host.store(blocks)
        if self.lower is None or not rows.nbytes:  # a pool that has seen no key
            return 0
        staged = self.staged()
        for start in range(0, len(blocks), STAGED):
            few = blocks[start : start + STAGED]
            rows.take(group, [each.block for each in few], staged, range(len(few)))
            rows.settle()
            for each, row in zip(few, staged, strict=False):
                self.lower.put(each.entry, group, row)
        return len(blocks)

    def _lost(self, entry: PrefixBlock, group: int, row: Tensor) -> None:
        """Host memory needs the place of a block."""
        self.counts.blocks_dropped += 1
        if self.lower is not None and self._rows is not None:
            self._rows.settle()
            self.lower.put(entry, group, row)

    def _unmark(self) -> None:
        while self._marked:
            entry, group, _ = self._marked[-1]
            if entry.below is not None and entry.below.get(group) == PENDING:
                entry.below = {each: place for each, place in entry.below.items() if each != group} or None
                self._pool.prefixes.index.lost_below(entry)
            self._marked.pop()

    def _put_back(self, nbytes: int, seconds: float) -> None:
        self.counts.bytes_in += nbytes
        self.counts.seconds_in += seconds
        self.costs.told_copy("host", nbytes, seconds)


def tiers_below(pool: KVPool, size: int) -> Swapping:
    """`size` bytes of host memory below a pool, which gets what the pool evicts from now on."""
    pool.prefixes.lower = swapping = Swapping(pool, size)
    pool.prefixes.index.watchers.append(swapping)
    pool.change.finish = swapping.flush
    pool.counts.swaps = swapping.counts
    return swapping
