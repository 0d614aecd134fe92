"""Reading from a prefix store beside the engine, so that no step waits for a disk: a request does, before it begins."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from hfpaged.prefix_store import PrefixStore, StoredBlock
from hfpaged.prefix_store_block import BlockAddress

NUM_THREADS = 2
# What was read and not taken yet; more is not read ahead.
STAGED_BYTES = 256 * 2**20
# A request waits no longer for its blocks. What nobody has taken for so long is let go.
PATIENCE_SECONDS, KEPT_SECONDS = 10.0, 30.0
# What could not be read is not asked for again for so long.
FAILED_SECONDS = 10.0


class Reading(NamedTuple):
    """A block that is under way, and since when."""

    address: BlockAddress
    group: int
    nbytes: int
    began: float

    @property
    def name(self) -> str:
        return self.address.name(self.group)


class StoreReader:
    """Reads blocks ahead and keeps them until they are taken."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._reading: dict[str, Reading] = {}
        self._staged: OrderedDict[str, tuple[StoredBlock, float]] = OrderedDict()  # with when it was asked for last
        self._failed: dict[str, float] = {}  # when
        self._timed: list[tuple[int, float]] = []
        self._queue: SimpleQueue[Reading | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._came = threading.Condition()

    def fetch(self, wanted: Iterable[tuple[BlockAddress, int]], nbytes: int) -> bool:
        """Read these, of about `nbytes` each, as far as there is room; whether any of them is still under way. Asked
        again, it keeps those that have come.
        """
        now, under_way = time.monotonic(), False
        with self._came:
            for address, group in wanted:
                one = Reading(address, group, nbytes, now)
                if one.name in self._staged:
                    self._staged[one.name] = self._staged[one.name][0], now
                    self._staged.move_to_end(one.name)
                    continue
                known = self._reading.get(one.name)
                if known is None and not self._has_failed(one.name, now):
                    if (len(self._reading) + len(self._staged) + 1) * nbytes > STAGED_BYTES:
                        break
                    known = self._reading[one.name] = one
                    self._queue.put(one)
                under_way |= known is not None and now - known.began < PATIENCE_SECONDS
            self._let_go(now)
            if self._reading and not self._threads:
                self._start()
        return under_way

    def is_staged(self, address: BlockAddress, group: int) -> bool:
        """Whether a block was read and waits to be taken."""
        return address.name(group) in self._staged

    def may_be_there(self, address: BlockAddress, group: int) -> bool:
        """Whether it is worth reading a block."""
        return not self._has_failed(address.name(group), time.monotonic()) and self._store.has(address, group)

    def take(self, address: BlockAddress, group: int) -> StoredBlock | None:
        """A block that was read, or is read now."""
        with self._came:
            staged = self._staged.pop(address.name(group), None)
        return staged[0] if staged else self._store.get(address, group)

    def timings(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of what was read since the last call."""
        with self._came:
            timed, self._timed = self._timed, []
        return timed

    def wait(self, seconds: float) -> bool:
        """Until all that is under way has come, at most so long; whether it has."""
        with self._came:
            return self._came.wait_for(lambda: not self._reading, seconds)

    def end(self) -> None:
        """No more is read."""
        for _ in self._threads:
            self._queue.put(None)

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._run, name=f"hfpaged-prefix-reader-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]
        with suppress(RuntimeError):  # no more threads: what is asked for is given up when patience ends
            for thread in self._threads:
                thread.start()

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            began = time.perf_counter()
            found = self._store.get(one.address, one.group)
            seconds = (time.perf_counter() - began) / NUM_THREADS
            with self._came:
                self._reading.pop(one.name, None)
                if found is None:
                    self._failed[one.name] = time.monotonic()
                else:
                    self._staged[one.name] = found, time.monotonic()
                    self._timed.append((one.nbytes, seconds))
                self._came.notify_all()

    def _has_failed(self, name: str, now: float) -> bool:
        since = self._failed.get(name)
        return since is not None and now - since < FAILED_SECONDS

    def _let_go(self, now: float) -> None:
        """What nobody has come for: its request was aborted, or the blocks came from elsewhere."""
        while self._staged and now - next(iter(self._staged.values()))[1] > KEPT_SECONDS:
            self._staged.popitem(last=False)
        if len(self._failed) > 2**12:
            self._failed.clear()
