"""Rows http and loop: the same streams of the batcher in process, and of a server around it by a process of clients.

Client and server share the cores of this machine, as the batcher in process does not.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import GenerationConfig

from hfpaged.bench.batch_ours import batcher_of, greedy
from hfpaged.bench.batch_workload import Workload, mixed
from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import not_measured
from hfpaged.bench.serve_client import Send, play
from hfpaged.bench.serve_host import hosting
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import in_turn

POOL = 32_768  # tokens, on both sides
NO_TOKENIZER = "this model has no tokenizer, and a server answers in text"


@dataclass(frozen=True)
class Side:
    """One run: its texts, tokens per second, and of a server what its loop took and for how long it was blocked."""

    texts: list[str]
    speed: float
    loop_share: float = 0.0
    loop_seconds_each: float = 0.0
    client_share: float = 0.0
    longest_block: float = 0.0


@dataclass(frozen=True)
class Both:
    """The runs of both sides, which took turns."""

    inside: list[Side]
    served: list[Side]

    @property
    def same(self) -> bool:
        runs = [*self.inside, *self.served]
        return all(run.texts == runs[0].texts for run in runs)


def cost(setting: Setting, shape: Shape) -> Measured:
    """The value is the part of the speed that is lost on the way through the server."""
    if setting.tokenizer is None:
        return not_measured(NO_TOKENIZER)
    both = _runs(setting, shape)
    shares = [statistics.median(each) for each in zip(*((run.loop_share, run.client_share) for run in both.served),
                                                      strict=True)]  # fmt: skip
    each = 1e6 * statistics.median(run.loop_seconds_each for run in both.served)
    note = (
        f"in process {_spread(both.inside)}, through the server {_spread(both.served)} tok/s; its event loop takes "
        f"{100 * shares[0]:.1f} % of one core, {each:.0f} us a token; the clients, on the same cores, "
        f"{100 * shares[1]:.1f} %"
    )
    inside, served = ([run.speed for run in runs] for runs in (both.inside, both.served))
    return in_pairs(inside, served, "tok/s", both.same, note, of=_lost)


def longest_block(setting: Setting, shape: Shape) -> Measured:
    """The value is in milliseconds: the longest time between two awakenings of a task that sleeps for 10 ms."""
    if setting.tokenizer is None:
        return not_measured(NO_TOKENIZER)
    both = _runs(setting, shape)
    longest = [1e3 * run.longest_block for run in both.served]
    each = ", ".join(f"{value:.0f}" for value in longest)
    return Measured(max(longest), same_tokens=both.same, note=f"by run: {each} ms", values=tuple(longest))


def _lost(inside: float, served: float) -> float:
    return 1 - served / inside


def _spread(runs: list[Side]) -> str:
    speeds = [run.speed for run in runs]
    return f"{min(speeds):.1f} to {max(speeds):.1f}"


@lru_cache(maxsize=1)
def _runs(setting: Setting, shape: Shape) -> Both:
    """Minutes with a model of use, so that rows share them."""
    prompts = mixed(setting, shape).prompts
    workload = Workload(prompts, [shape.new] * len(prompts))
    _inside(setting, Workload(prompts, [2] * len(prompts)))  # kernels are compiled on first use
    both = Both([], [])
    for number in range(setting.repeats):
        turns = [(both.inside, _inside), (both.served, _served)]
        for runs, side in in_turn(number, turns):
            runs.append(side(setting, workload))
    return both


def _inside(setting: Setting, workload: Workload) -> Side:
    """Streams here too: what HTTP costs is not to be mixed up with what it costs to come one after the other."""
    with batcher_of(setting, POOL, tokenizer=setting.tokenizer) as batcher:
        texts, seconds = asyncio.run(_streams(batcher, workload))
    return Side(texts, workload.tokens / seconds)


async def _streams(batcher: Any, workload: Workload) -> tuple[list[str], float]:
    """The texts, and the seconds from the first request to the end of the last one."""
    async with batcher.running() as engine:

        async def text_of(prompt: list[int], config: GenerationConfig) -> str:
            return "".join([event.text async for event in engine.stream(prompt, config)])

        start = time.perf_counter()
        asked = zip(workload.prompts, greedy(workload), strict=True)
        texts = await asyncio.gather(*(text_of(prompt, config) for prompt, config in asked))
        return list(texts), time.perf_counter() - start


def _served(setting: Setting, workload: Workload) -> Side:
    sends = [
        Send(0.0, {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True})
        for prompt, new in zip(workload.prompts, workload.new, strict=True)
    ]
    with batcher_of(setting, POOL, tokenizer=setting.tokenizer) as batcher, hosting(batcher) as (url, pulse):
        pulse.restart()
        played = play(f"{url}/v1/completions", sends)
        loop_seconds, longest = pulse.cpu_seconds, pulse.longest
    return Side(
        played.texts, workload.tokens / played.seconds, loop_seconds / played.seconds, loop_seconds / workload.tokens,
        played.cpu_seconds / played.seconds, longest,
    )  # fmt: skip
