"""Writing into a prefix store beside the engine: a thread of its own, with a bounded amount of work before it."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from hfpaged.prefix_block import PrefixBlock
from hfpaged.prefix_store import PrefixStore
from hfpaged.prefix_store_block import BlockAddress, Layers

# Contents of evicted blocks that may wait, in bytes, and published blocks, which wait without their contents.
BUFFER_BYTES = 64 * 2**20
MOST_PUBLISHED = 2**14
# Of published blocks so many are copied in one go, while the pool waits.
AT_ONCE = 4
# A process that ends writes on for so long.
SECONDS_AT_EXIT = 5.0


class Copied(NamedTuple):
    """A block with its contents, as `PrefixStore.put` takes it."""

    address: BlockAddress
    group: int
    layers: Layers
    parts: Many[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Published(NamedTuple):
    """A block whose contents lie in a pool, as long as they do."""

    entry: PrefixBlock
    group: int
    address: BlockAddress


# Gives the contents of those that are still there. It may wait for the lock of the pool.
Take = Callable[[Many[Published]], Many[Copied]]


class StoreWriter:
    """What was evicted is written first, as it takes memory; then what was published, the first one first, so that of
    each prefix the beginning is there before its end.
    """

    def __init__(self, store: PrefixStore, take: Take) -> None:
        self._store, self._take = store, take
        self._copied: deque[Copied] = deque()
        self._published: deque[Published] = deque()
        self._bytes = 0  # of `_copied`
        self._busy = False
        self._ends_at: float | None = None
        self._came = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        """Blocks that are not written yet."""
        return len(self._copied) + len(self._published) + self._busy

    def has_room(self, nbytes: int) -> bool:
        """Whether contents of so many bytes may wait; if not they count as dropped."""
        fits = self._bytes + nbytes <= BUFFER_BYTES and self._ends_at is None and not self._store.is_resting
        self._store.counts.dropped += not fits
        return fits

    def write(self, block: Copied) -> None:
        """Let a block be written, for which there is room."""
        with self._came:
            self._copied.append(block)
            self._bytes += block.nbytes
            self._start()

    def publish(self, block: Published) -> None:
        """Let a block be written if it is still there when its turn comes. One that is known is marked as used."""
        with self._came:
            if len(self._published) >= MOST_PUBLISHED or self._ends_at is not None:
                self._store.counts.dropped += 1
                return
            self._published.append(block)
            self._start()

    def forget(self) -> None:
        """Nothing that waits is written."""
        with self._came:
            self._copied.clear()
            self._published.clear()
            self._bytes = 0

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, at most so long; whether it was."""
        with self._came:
            return self._came.wait_for(lambda: not self.num_waiting, seconds)

    def end(self, seconds: float = 0.0) -> None:
        """Take nothing more, and write on for at most so long."""
        with self._came:
            self._ends_at = time.monotonic() + seconds
            self._came.notify_all()
        if seconds and self._thread is not None:
            self._thread.join(seconds)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="hfpaged-prefix-store", daemon=True)
            with suppress(RuntimeError):  # no more threads, or the interpreter ends: tried again with the next block
                thread.start()
                self._thread = thread
                _writers.add(self)
        self._came.notify_all()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                for block in self._contents(work):
                    self._store.put(*block)
            except Exception as error:  # memory that is not to be had, say; nobody waits for this but later services
                self._store.failed_to_write(error)
            del work
            with self._came:
                self._busy = False
                self._came.notify_all()

    def _next(self) -> Copied | list[Published] | None:
        """The next ones to write, None at the end."""
        with self._came:
            self._came.wait_for(lambda: self._copied or self._published or self._ends_at is not None)
            if self._ends_at is not None and (time.monotonic() >= self._ends_at or not self.num_waiting):
                self._store.counts.dropped += len(self._copied) + len(self._published)
                self._copied.clear()
                self._published.clear()
                self._came.notify_all()
                return None
            self._busy = True
            if self._copied:
                self._bytes -= self._copied[0].nbytes
                return self._copied.popleft()
            return [self._published.popleft() for _ in range(min(AT_ONCE, len(self._published)))]

    def _contents(self, work: Copied | list[Published]) -> Many[Copied]:
        if isinstance(work, Copied):
            return [work]
        missing = [block for block in work if not self._store.use(block.address, block.group)]
        if self._store.is_resting:
            self._store.counts.dropped += len(missing)
            return []
        return self._take(missing) if missing else []


_writers: weakref.WeakSet[StoreWriter] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Who ends in peace has written what it computed."""
    until = time.monotonic() + SECONDS_AT_EXIT
    for writer in list(_writers):
        writer.end(max(until - time.monotonic(), 0.1))
