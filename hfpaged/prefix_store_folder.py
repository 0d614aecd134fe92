"""The directory of a prefix store: files by name, bounded in bytes, used by several processes at once without a lock.

Each file is whole or not there, has a name that says what is in it, and is never changed: so whoever loses a race finds
a file gone, or there already, and nothing else.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hfpaged.config import format_bytes
from hfpaged.errors import InvalidConfigError
from hfpaged.tensor_file import TEMPORARY_PREFIX, TEMPORARY_SUFFIX

_SUFFIX = ".safetensors"
_OWN = re.compile(rf"[0-9a-f]{{64}}-[0-9]+{re.escape(_SUFFIX)}")
# As parts of the limit: the directory is read anew when so much was written since the last time, and files are removed
# when less than the reserve is left, until two reserves are. Eight processes that write at once stay below the limit.
_LOOK_AGAIN, _RESERVE = 128, 16
# A process that was killed while it wrote leaves a temporary file. It takes milliseconds to write one. A time that is
# so far ahead comes from before the clock was set back.
ABANDONED_SECONDS = 600.0


class _Found(NamedTuple):
    mtime_ns: int
    name: str
    size: int


class StoreFolder:
    """At most `limit` bytes of files in the directory `path`, which is made if it is not there; the least recently used
    go first. Only files with names like ours are looked at.

    Raises InvalidConfigError where the directory cannot be made, or where others may write into it.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int, clock: Callable[[], float] = time.time) -> None:
        self.path, self.limit = Path(path).expanduser().absolute(), limit
        self.num_removed = 0  # to make room
        self.num_files = self.num_bytes = 0  # at the last look, with what was written since
        self._clock = clock
        self._written = 0  # bytes since the last look
        _make_private(self.path)
        with suppress(OSError):  # looked at again, and told of, at the first write
            self.look()

    def file(self, name: str) -> Path:
        """Where the file with that name is or would be."""
        return self.path / (name + _SUFFIX)

    def has(self, name: str) -> bool:
        return os.path.exists(self.file(name))  # False for what may not be looked at, where Path.exists() raises

    def read(self, name: str) -> bytes | None:
        """All of a file, None where there is none. Raises OSError."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            handle = os.open(self.file(name), flags)
        except FileNotFoundError:
            return None
        with open(handle, "rb", buffering=0) as file:
            about = os.fstat(handle)
            return file.read() if stat.S_ISREG(about.st_mode) and about.st_size <= self.limit else b""

    def touch(self, name: str, age: float = 0.0) -> bool:
        """A file was used, `age` seconds ago; whether it is there. One that cannot be touched counts as there."""
        moment = self._clock() - age
        try:
            os.utime(self.file(name), (moment, moment))
        except OSError as error:  # a directory that is only read, say
            return not isinstance(error, FileNotFoundError)
        return True

    def remove(self, name: str) -> None:
        """Nobody shall read a file again."""
        with suppress(OSError):  # in a directory that is only read it stays, and is found damaged each time
            os.unlink(self.file(name))

    def make_room(self, size: int) -> bool:
        """Remove the least recently used files until one of so many bytes fits; whether it does. Raises OSError."""
        if size > self.limit:
            return False
        if self._written + size > self.limit // _LOOK_AGAIN:
            self.look(size)
        return self.num_bytes + size <= self.limit

    def wrote(self, size: int) -> None:
        """A file of so many bytes was added."""
        self._written += size
        self.num_files += 1
        self.num_bytes += size

    def look(self, coming: int = 0) -> None:
        """Read the directory, and remove what is too much when `coming` bytes more shall fit. Raises OSError."""
        found, temporary = self._scan()
        total = sum(file.size for file in found) + temporary
        kept = len(found)
        reserve = self.limit // _RESERVE
        if total + coming > self.limit - reserve:
            for file in sorted(found):
                if total + coming <= self.limit - 2 * reserve:
                    break
                with suppress(FileNotFoundError):  # another process was faster
                    os.unlink(self.path / file.name)
                    self.num_removed += 1
                total, kept = total - file.size, kept - 1
        self.num_files, self.num_bytes, self._written = kept, total, 0

    def _scan(self) -> tuple[list[_Found], int]:
        """(our files, the bytes of those that are being written). Those that nobody writes any more are removed."""
        found, temporary, now = [], 0, self._clock()
        with os.scandir(self.path) as entries:
            for entry in entries:
                is_temporary = entry.name.startswith(TEMPORARY_PREFIX) and entry.name.endswith(TEMPORARY_SUFFIX)
                if not is_temporary and not _OWN.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):  # another process was faster
                    about = entry.stat(follow_symlinks=False)
                    is_ahead = about.st_mtime > now + ABANDONED_SECONDS
                    if not is_temporary:
                        # What is ahead of all would never go again, and what is written now would go before it.
                        found.append(_Found(0 if is_ahead else about.st_mtime_ns, entry.name, about.st_size))
                    elif is_ahead or about.st_mtime < now - ABANDONED_SECONDS:
                        os.unlink(entry.path)
                    else:
                        temporary += about.st_size
        return found, temporary


def _make_private(path: Path) -> None:
    """Raises InvalidConfigError for a directory that cannot be made, or into which other users may put files: what lies
    there becomes keys and values of our answers.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.stat()
    except OSError as error:
        raise InvalidConfigError(
            f"prefix_store={str(path)!r} is no directory and cannot be made one: {error}; name a directory that this "
            "user may write to"
        ) from error
    mode = stat.S_IMODE(about.st_mode)
    if hasattr(os, "geteuid") and about.st_uid not in (os.geteuid(), 0):
        raise InvalidConfigError(
            f"prefix_store={str(path)!r} belongs to user {about.st_uid}, and this is user {os.geteuid()}: what is put "
            "there would become parts of answers; name a directory of your own"
        )
    if mode & 0o022:
        raise InvalidConfigError(
            f"prefix_store={str(path)!r} has mode {mode:03o}, so that other users may put files there, "
            f"which would become parts of answers; run chmod 700 {path}, or name another directory"
        )


def check_limit(limit: int) -> int:
    """Bytes. Raises InvalidConfigError."""
    if limit < 2**20:
        raise InvalidConfigError(
            f"prefix_store_size={limit} is {format_bytes(limit)}; a store needs at least 1 MiB, use 1GiB or more"
        )
    return limit
