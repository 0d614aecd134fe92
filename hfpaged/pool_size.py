"""How large a pool is that was given memory, or nothing."""

from __future__ import annotations

import psutil
import torch

from hfpaged.config import format_bytes, parse_bytes
from hfpaged.errors import InvalidConfigError


def free_memory(device: torch.device) -> int:
    """Bytes that are free on `device` now."""
    return device_memory(device)[0]


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of `device`: (free now, in all)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def count_blocks(memory: int, block_bytes: int, block_size: int, num_groups: int, where: str = "") -> int:
    """How many blocks fit into `memory` bytes (`where`: on which device). Raises InvalidConfigError where one sequence
    does not.
    """
    count = memory // block_bytes
    if count < num_groups:
        raise InvalidConfigError(
            f"{format_bytes(memory)}{where and f' on {where}'} hold {count} blocks of {format_bytes(block_bytes)} "
            f"({block_size} tokens each); one sequence needs at least {num_groups}. Give more memory"
        )
    return count


def check_swap_space(swap_space: int | str) -> int:
    """Bytes of host memory for evicted blocks, 0 for none. Raises InvalidConfigError where so many are not free."""
    size = parse_bytes(swap_space, "swap_space", minimum=0)
    free = int(psutil.virtual_memory().available) if size else 0
    if size > free:
        raise InvalidConfigError(
            f"swap_space={swap_space!r} is {format_bytes(size)} of host memory, and {format_bytes(free)} are free; "
            "give less, or 0 for none"
        )
    return size
