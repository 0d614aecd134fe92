"""What is watched while the load runs: memory, the pool, times, and what the Python heap is made of."""

from __future__ import annotations

import ctypes
import gc
import time
from array import array
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import psutil
import torch

from hfpaged.engine import events
from hfpaged.kv_pool import KVPool

FULL = 0.9
MOST_SAMPLES = 2000  # then every other one goes: what is watched must not grow by being watched


class Sample(NamedTuple):
    """At so many seconds of the load, after so many requests. Device memory as torch's allocator counts it, 0 on CPUs.
    Blocks of the pool by state.
    """

    seconds: float
    requests: int
    resident: int
    allocated: int
    reserved: int
    used: int
    cached: int
    total: int


class Watch:
    """A hook of the batcher that keeps times, and samples that are taken now and then."""

    def __init__(self, pool: KVPool, device: torch.device, seconds: float) -> None:
        self._pool, self._device = pool, device
        self._process = psutil.Process()
        self._every = max(min(seconds / 200, 1.0), 0.02)
        self._due = 0.0
        self.began = time.perf_counter()
        self.is_loading = True
        self.samples: list[Sample] = []
        self.requests = 0  # that came to their end
        self.tokens = self.steps = self.preemptions = 0
        self.peak = self.step_seconds = self.full_seconds = 0.0
        self.computed_at = 0.0  # when a step has computed anything last
        self.ended_at, self.first_token, self.per_token = array("d"), array("d"), array("d")

    @property
    def seconds(self) -> float:
        """Since the load began."""
        return time.perf_counter() - self.began

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StepFinished):
            self._step(event)
        elif isinstance(event, events.Ended):
            self.requests += 1
            if isinstance(event, events.Finished):
                self._finished(event)

    def look(self) -> None:
        """Take a sample, if one is due."""
        if self.seconds >= self._due:
            self.sample()
            self._due = self.seconds + self._every
            if len(self.samples) > MOST_SAMPLES:
                del self.samples[1::2]
                self._every *= 2

    def sample(self) -> Sample:
        """Take one now."""
        stats, is_cuda = self._pool.blocks.stats, self._device.type == "cuda"
        self.samples.append(
            Sample(
                self.seconds, self.requests, self._process.memory_info().rss,
                torch.cuda.memory_allocated(self._device) if is_cuda else 0,
                torch.cuda.memory_reserved(self._device) if is_cuda else 0,
                stats.used, stats.cached, stats.total,
            )
        )  # fmt: skip
        return self.samples[-1]

    def _step(self, event: events.StepFinished) -> None:
        self.steps += 1
        self.tokens += event.num_sampled
        if event.num_tokens:
            self.computed_at = self.seconds
        self.preemptions += event.preemptions
        share = event.blocks_used / max(event.blocks_total, 1)
        if self.is_loading:
            self.peak = max(self.peak, share)
            self.step_seconds += event.seconds
            self.full_seconds += event.seconds if share >= FULL else 0.0

    def _finished(self, event: events.Finished) -> None:
        metrics, longest = event.metrics, max(event.sequence_tokens, default=0)
        if metrics.first_token_time is None or metrics.finished_time is None or longest < 2:
            return
        self.ended_at.append(self.seconds)
        self.first_token.append(metrics.first_token_time - metrics.arrival_time)
        self.per_token.append((metrics.finished_time - metrics.first_token_time) / (longest - 1))


def heap() -> Counter[str]:
    """How many objects of each type the garbage collector knows."""
    return Counter(type(each).__qualname__ for each in gc.get_objects())


def trim_heap() -> None:
    """Give back to the system what was freed before, as a model's loading frees gigabytes: resident memory would not
    grow until a leak had filled those first. By glibc's malloc_trim(3); nothing with other allocators.
    """
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
