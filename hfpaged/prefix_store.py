"""The prefix store: blocks in files that the services of one machine share. Nothing that goes wrong with it is an error
of a request: what cannot be read was never there, what cannot be written is not.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence as Many
from typing import NamedTuple

from torch import Tensor

from hfpaged.errors import PrefixFileError
from hfpaged.prefix_store_block import BlockAddress, BlockFile, Layers, StoreFacts, block_file, read_block
from hfpaged.prefix_store_folder import StoreFolder, check_limit
from hfpaged.store_counts import StoreCounts
from hfpaged.tensor_file import parse_file, write_file

logger = logging.getLogger("hfpaged")

# A disk that cannot be written is left alone for so long.
REST_SECONDS = 60.0
# Seconds by which a block counts as used before the one in front of it, so that the end of a prefix goes first, however
# slowly it was written.
_OLDER_PER_BLOCK = 0.1


class StoredBlock(NamedTuple):
    """Of a layer group: the kinds of its layers, and their keys and values as `block_file` takes them."""

    layers: Layers
    parts: list[Tensor]


class PrefixStore:
    """Blocks of one kind of pool in a directory, at most `limit` bytes of all kinds together. Any thread may call it.

    Raises InvalidConfigError for a directory that cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], facts: StoreFacts, limit: int) -> None:
        self.folder = StoreFolder(path, check_limit(limit))
        self.facts = facts
        self.counts = StoreCounts()
        self._rests_until = 0.0
        self._told: set[str] = set()

    def has(self, address: BlockAddress, group: int) -> bool:
        """Whether there is a file for a block; what is in it will be seen when it is read."""
        return self.folder.has(address.name(group))

    def use(self, address: BlockAddress, group: int) -> bool:
        """A block is used, so it stays longer than others; whether it is there."""
        return self.folder.touch(address.name(group), address.number * _OLDER_PER_BLOCK)

    @property
    def is_resting(self) -> bool:
        """Whether nothing is written for a while, as the disk could not be written."""
        return time.monotonic() < self._rests_until

    def put(self, address: BlockAddress, group: int, layers: Layers, parts: Many[Tensor]) -> bool:
        """Write a block, `parts` as `block_file` takes them, unless it is there; whether it is now."""
        if self.use(address, group):
            return True
        if self.is_resting or not self._write(address, group, block_file(self.facts, address, group, layers, parts)):
            self.counts.dropped += 1
            return False
        return True

    def get(self, address: BlockAddress, group: int) -> StoredBlock | None:
        """A block, None where it is not there or cannot be trusted."""
        began = time.perf_counter()
        name = address.name(group)
        try:
            raw = self.folder.read(name)
            if raw is None:
                return None
            found = StoredBlock(*read_block(self.facts, address, group, *parse_file(raw, self.folder.file(name))))
        except (OSError, MemoryError, RuntimeError) as error:
            self.counts.failed += 1
            self._tell("read", f"the prefix store {str(self.folder.path)!r} cannot be read: {error}; prefixes that it "
                       "may have are computed")  # fmt: skip
            return None
        except PrefixFileError as error:
            self.folder.remove(name)
            self.counts.damaged += 1
            self._tell("damaged", f"a file of the prefix store is not used and removed: {error}")
            return None
        self.use(address, group)
        self.counts.read += 1
        self.counts.bytes_read += len(raw)
        self.counts.read_seconds += time.perf_counter() - began
        return found

    def failed_to_write(self, error: Exception) -> None:
        """Nothing is written for a while."""
        self._rests_until = time.monotonic() + REST_SECONDS
        self._tell("write", f"the prefix store {str(self.folder.path)!r} cannot be written: {error!r}; it is still "
                   f"read, and writing is tried again every {REST_SECONDS:.0f} s")  # fmt: skip

    def _write(self, address: BlockAddress, group: int, block: BlockFile) -> bool:
        began = time.perf_counter()
        try:
            if not self.folder.make_room(block.nbytes):
                return False
            # Its digest tells its readers whether it survived a crash of the machine: nothing waits for the disk here.
            size = write_file(
                self.folder.file(address.name(group)), block.manifest, block.specs, block.tensors, durable=False
            )  # fmt: skip
        except OSError as error:
            self.failed_to_write(error)
            return False
        self.folder.wrote(size)
        self.use(address, group)
        self.counts.written += 1
        self.counts.bytes_written += size
        self.counts.write_seconds += time.perf_counter() - began
        return True

    def _tell(self, what: str, words: str) -> None:
        """Say it once; the counts tell how often."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s", words)
