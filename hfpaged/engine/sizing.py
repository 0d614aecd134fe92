"""How much memory a pool gets that was promised a share of the device: what weights and activations leave of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from hfpaged.config import format_bytes
from hfpaged.errors import InvalidConfigError

# Of the whole device, where nothing is said. On a CPU others live in the same memory.
SHARE_ON_GPU, SHARE_ON_CPU = 0.85, 0.5
# On a CPU the trial forward is no longer than this, and what it took is scaled: it would take seconds.
TRIAL_TOKENS_ON_CPU = 512
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class PoolSizing:
    """Bytes. `used`: by weights and everything else on the device before the pool; `activations`: what one forward
    with the whole token budget takes for a while; `states`: what as many sequences as there may be keep outside of it.
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
    def pool(self) -> int:
        """What is left for the pool. Raises InvalidConfigError where nothing is."""
        left = (int(self.total * self.share) - self.used) // self.sharers - self.activations - self.states
        if left <= 0:
            raise InvalidConfigError(
                f"{self}: nothing is left for a pool; use a larger share, a smaller token budget or fewer sequences"
            )
        return left if self.most is None else min(left, self.most)

    def __str__(self) -> str:
        states = f", {format_bytes(self.states)} for the states of sequences" if self.states else ""
        shared = f", divided by {self.sharers} processes" if self.sharers > 1 else ""
        return (
            f"{self.share:.0%} of {format_bytes(self.total)}, less {format_bytes(self.used)} in use{shared}{states} "
            f"and {format_bytes(self.activations)} for the activations of a step"
        )


def check_share(memory: float) -> float:
    """A share of the device. Raises InvalidConfigError."""
    if not 0 < memory <= 1:
        raise InvalidConfigError(
            f"memory={memory} is no share of the device; use more than 0 and at most 1, or give bytes"
        )
    return memory


def size_pool(
    share: float, device: torch.device, forward: Callable[[int], int], num_tokens: int, num_seqs: int
) -> PoolSizing:
    """Run `forward(count)` once and see what it takes; it returns the bytes of the state of its sequence. `num_tokens`
    is the token budget, `num_seqs` the most sequences.
    """
    count = num_tokens if device.type == "cuda" else min(num_tokens, TRIAL_TOKENS_ON_CPU)
    states = forward(1) * num_seqs  # and what is allocated once is no activation
    activations = _peak(device, lambda: forward(count)) * num_tokens // count
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return PoolSizing(total, share, total - free, activations, states)
    memory = psutil.virtual_memory()
    return PoolSizing(memory.total, share, memory.total - memory.available, activations, states)


def default_share(device: torch.device) -> float:
    return SHARE_ON_GPU if device.type == "cuda" else SHARE_ON_CPU


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that `run` takes at most beyond what there was before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_resident(run)


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
