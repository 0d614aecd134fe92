"""Sizes as users write them, checked once."""

from __future__ import annotations

import os
import re

from hfpaged.errors import InvalidConfigError

DEFAULT_BLOCK_SIZE = 16
DEFAULT_STORE_SIZE = "10GiB"  # of a prefix store
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(memory: int | str, name: str = "memory", minimum: int = 1) -> int:
    """Bytes from a number or a text such as "2GiB", "512 MB". Raises InvalidConfigError."""
    if isinstance(memory, int) and not isinstance(memory, bool):
        count = memory
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
        if match is None or match[2] not in _UNITS:
            raise InvalidConfigError(f'{name}={memory!r} is no size; write bytes or a text such as "2GiB" or "512MB"')
        count = int(float(match[1]) * _UNITS[match[2]])
    if count < minimum:
        raise InvalidConfigError(f"{name}={memory!r} is {count} bytes; a pool needs more than none")
    return count


def wants_debug(debug: bool | None) -> bool:
    """Whether a pool is in debug mode: as its user said, else as HFPAGED_DEBUG says."""
    if debug is None:
        return os.environ.get("HFPAGED_DEBUG", "").strip().lower() in ("1", "true", "yes", "on")
    return debug


def format_bytes(count: float) -> str:
    """A size for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def check_block_size(block_size: int) -> int:
    """A power of two from 1 to 1024. Raises InvalidConfigError."""
    if not isinstance(block_size, int) or block_size < 1 or block_size & (block_size - 1):
        raise InvalidConfigError(f"block_size={block_size} is not a power of two, which the kernels need; use 16 or 32")
    if block_size > 1024:
        raise InvalidConfigError(f"block_size={block_size} is above 1024; large blocks waste memory, use 16 or 32")
    return block_size


def check_num_blocks(num_blocks: int, minimum: int) -> int:
    """At least `minimum` (one block per layer group). Raises InvalidConfigError."""
    if not isinstance(num_blocks, int) or num_blocks < minimum:
        raise InvalidConfigError(
            f"num_blocks={num_blocks} is too few for one sequence, which needs at least {minimum} "
            "(one block for each layer group); give more blocks or memory"
        )
    return num_blocks


def check_size(memory: int | str | None, num_blocks: int | None, num_groups: int) -> int:
    """Blocks of a pool, 0 where its memory decides. Raises InvalidConfigError for both, and for too few."""
    if memory is not None and num_blocks is not None:
        raise InvalidConfigError(
            f"memory={memory!r} and num_blocks={num_blocks} both say how large the pool is; give one"
        )
    return 0 if num_blocks is None else check_num_blocks(num_blocks, num_groups)


def check_count(name: str, count: int, minimum: int) -> int:
    """A whole number of at least `minimum`. Raises InvalidConfigError."""
    if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
        raise InvalidConfigError(f"{name}={count!r} is no number of tokens; give a whole number of at least {minimum}")
    return count
