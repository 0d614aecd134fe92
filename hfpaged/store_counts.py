"""What a prefix store has done, counted for those who report it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class StoreCounts:
    """Blocks of layer groups, but for bytes and seconds, which are those of what was `written` and `read`.

    `dropped` were not written, as there was too much to write or the disk did not take them; `damaged` are files that
    were not what they should be; `failed` are reads that the system refused.
    """

    written: int = 0
    read: int = 0
    dropped: int = 0
    damaged: int = 0
    failed: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0

    def add(self, other: StoreCounts) -> None:
        """Count what `other` has counted, too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
