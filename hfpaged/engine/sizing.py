"""How much memory a pool gets that was promised a share of the device: what weights and activations leave of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import psutil
import torch

from hfpaged.config import format_bytes
from hfpaged.errors import InvalidConfigError
from hfpaged.pool_size import device_memory

# Of the whole device, where nothing is said. On a CPU others live in the same memory.
SHARE_ON_GPU, SHARE_ON_CPU = 0.85, 0.5
# On a CPU the trial forward is no longer than this, and what it took is scaled: it would take seconds.
TRIAL_TOKENS_ON_CPU = 512
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class PoolSizing:
    """Bytes of one device. `used`: by weights and everything else before the pool; `activations`: what one forward with
    the whole token budget takes for a while; `states`: what as many sequences as there may be keep outside of the pool.
    `sharers`: how many processes divide what is left of the share; `most`: what others leave of it at most.
    """

    total: int
    share: float
    used: int
    activations: int
    states: int = 0
    sharers: int = 1
    most: int | None = None

    @property
    def left(self) -> int:
        """For the pool; less than 0 where that is nothing."""
        left = (int(self.total * self.share) - self.used) // self.sharers - self.activations - self.states
        return left if self.most is None else min(left, self.most)

    @property
    def pool(self) -> int:
        """What is left for the pool. Raises InvalidConfigError where nothing is."""
        if self.left <= 0:
            raise InvalidConfigError(
                f"{self}: nothing is left for a pool; use a larger share, a smaller token budget or fewer sequences"
            )
        return self.left

    def __str__(self) -> str:
        states = f", {format_bytes(self.states)} for the states of sequences" if self.states else ""
        shared = f", divided by {self.sharers} processes" if self.sharers > 1 else ""
        return (
            f"{self.share:.0%} of {format_bytes(self.total)}, less {format_bytes(self.used)} in use{shared}{states} "
            f"and {format_bytes(self.activations)} for the activations of a step"
        )


@dataclass(frozen=True)
class SpreadSizing:
    """A model whose layers lie on several devices: for each, its own sizing and the bytes that a block takes of it. A
    block has a part in every layer, so the device that holds the fewest decides.
    """

    parts: dict[torch.device, PoolSizing]
    block_bytes: Mapping[torch.device, int]

    @property
    def pool(self) -> int:
        """What is left for the pool, on all devices together. Raises InvalidConfigError where nothing is on one."""
        return min(self._blocks(device) for device in self.parts) * sum(self.block_bytes.values())

    @property
    def activations(self) -> int:
        return sum(part.activations for part in self.parts.values())

    def __str__(self) -> str:
        return "; ".join(f"{device}: {part}, {self._blocks(device)} blocks" for device, part in self.parts.items())

    def _blocks(self, device: torch.device) -> int:
        try:
            return self.parts[device].pool // self.block_bytes[device]
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{device}: {error}, or another device_map") from None


Sizing: TypeAlias = PoolSizing | SpreadSizing


def check_share(memory: float) -> float:
    """A share of the device. Raises InvalidConfigError."""
    if not 0 < memory <= 1:
        raise InvalidConfigError(
            f"memory={memory} is no share of the device; use more than 0 and at most 1, or give bytes"
        )
    return memory


def size_pool(
    shares: Callable[[torch.device], float], block_bytes: Callable[[], Mapping[torch.device, int]],
    forward: Callable[[int], Mapping[torch.device, int]], num_tokens: int, num_seqs: int,
) -> Sizing:  # fmt: skip
    """Run `forward(count)` once and see what it takes; it returns the bytes of the state of its sequence by device.
    `block_bytes` tells afterwards on which devices layers lie, and what a block takes of each; `shares` what the pool
    may have of them. `num_tokens` is the token budget, `num_seqs` the most sequences.
    """
    states = forward(1)  # and what is allocated once is no activation
    sizes = block_bytes()
    on_gpu = all(device.type == "cuda" for device in sizes)
    count = num_tokens if on_gpu else min(num_tokens, TRIAL_TOKENS_ON_CPU)
    peaks = _peaks(list(sizes), lambda: forward(count))
    parts = {}
    for device, peak in peaks.items():
        free, total = device_memory(device)
        activations = peak * num_tokens // count
        parts[device] = PoolSizing(
            total, shares(device), total - free, activations, states.get(device, 0) * num_seqs
        )  # fmt: skip
    return next(iter(parts.values())) if len(parts) == 1 else SpreadSizing(parts, sizes)


def default_share(device: torch.device) -> float:
    return SHARE_ON_GPU if device.type == "cuda" else SHARE_ON_CPU


def _peaks(devices: list[torch.device], run: Callable[[], object]) -> dict[torch.device, int]:
    """Bytes that `run` takes at most beyond what there was before, on each device."""
    gpus = [device for device in devices if device.type == "cuda"]
    before = {device: torch.cuda.memory_allocated(device) for device in gpus}
    for device in gpus:
        torch.cuda.reset_peak_memory_stats(device)
    resident = 0
    if len(gpus) < len(devices):
        resident = _peak_resident(run)
    else:
        run()
    for device in gpus:
        torch.cuda.synchronize(device)
    return {
        device: torch.cuda.max_memory_allocated(device) - before[device] if device in before else resident
        for device in devices
    }


def _peak_resident(run: Callable[[], object]) -> int:
    """By looking at the process again and again: torch does not count what it takes on a CPU."""
    process, done = psutil.Process(), threading.Event()
    before = highest = process.memory_info().rss

    def watch() -> None:
        nonlocal highest
        while not done.wait(POLL_SECONDS):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(highest, process.memory_info().rss) - before
