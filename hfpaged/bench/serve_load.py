"""Rows load, first-token and between: requests that come at random times, to this server and to another one.

The servers take turns, each started for its run alone. Whatever a run has in its cache, it has from its own requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from hfpaged.bench import serve_processes
from hfpaged.bench.batch_workload import SPREAD
from hfpaged.bench.endpoint import ADVICE, Endpoint
from hfpaged.bench.random_prompts import SEED
from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import not_measured
from hfpaged.bench.serve_client import Played, Send, play
from hfpaged.bench.serve_http import NO_TOKENIZER
from hfpaged.bench.serve_processes import Target
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.texts import prose_ids
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import in_turn

SHORTEST_ANSWER = 8  # times shorter than the longest one
WARM_UP = 2  # requests of other texts

Open = Callable[[Setting], AbstractContextManager[Target]]


@dataclass(frozen=True)
class Request:
    """`at` seconds after the start of the load."""

    at: float
    prompt: str
    new: int


@dataclass(frozen=True)
class Run:
    """What one server made of one load."""

    played: Played
    requests: list[Request]

    @property
    def speed(self) -> float:
        """Output tokens per second, from the first request to the last answer's end."""
        return sum(request.new for request in self.requests) / self.played.seconds

    @property
    def tokens(self) -> list[int]:
        """What the server says that it has made for each request; where it does not, what was asked for."""
        counts = [answer.tokens for answer in self.played.answers]
        return [request.new if count is None else count for count, request in zip(counts, self.requests, strict=True)]

    def first(self, percent: int) -> float:
        return percentile([answer.first for answer in self.played.answers], percent)

    def gap(self, percent: int) -> float:
        return percentile([gap for answer in self.played.answers for gap in answer.gaps], percent)


@dataclass(frozen=True)
class Runs:
    """By turn, the two runs of the same load."""

    theirs: list[Run]
    ours: list[Run]

    @property
    def counts_agree(self) -> bool:
        """Whether both sides made as many tokens as they were asked for."""
        return all(run.tokens == [request.new for request in run.requests] for run in (*self.theirs, *self.ours))

    def equal_texts(self) -> tuple[int, int]:
        """How many answers have the same text on both sides, of how many. Half a character at an end is no text."""
        pairs = [
            (a.rstrip("\ufffd"), b.rstrip("\ufffd"))
            for theirs, ours in zip(self.theirs, self.ours, strict=True)
            for a, b in zip(theirs.played.texts, ours.played.texts, strict=True)
        ]
        return sum(a == b for a, b in pairs), len(pairs)


def throughput(setting: Setting, shape: Shape) -> Measured:
    """The value is the output tokens per second over those of the other server."""
    return _measured(setting, shape, lambda run: run.speed, "tok/s", lambda run: f"{run.speed:.1f}")


def first_token(setting: Setting, shape: Shape) -> Measured:
    """The value is the 99th percentile of the seconds to the first token over that of the other server."""
    return _measured(setting, shape, lambda run: run.first(99), "s", lambda run: f"p50 {run.first(50):.2f} s")


def between(setting: Setting, shape: Shape) -> Measured:
    """The same of the seconds between parts of a text that follow each other."""
    return _measured(setting, shape, lambda run: run.gap(99), "s", lambda run: f"p50 {1e3 * run.gap(50):.0f} ms")


def percentile(values: list[float], percent: int) -> float:
    """The least value that so many percent of all do not exceed."""
    return sorted(values)[max(-(-len(values) * percent // 100) - 1, 0)]


def _measured(
    setting: Setting, shape: Shape, of: Callable[[Run], float], unit: str, describe: Callable[[Run], str]
) -> Measured:
    reason = NO_TOKENIZER if setting.tokenizer is None else None
    if reason is None and setting.against is None:
        reason = serve_processes.obstacle()
    if reason is not None:
        return not_measured(reason)
    runs = _runs(setting, shape)
    same, all_of_them = runs.equal_texts()
    told = f"{same} of {all_of_them} texts are equal"
    note = (
        f"{told}; {setting.rate:g} requests/s come; theirs {', '.join(map(describe, runs.theirs))}, "
        f"ours {', '.join(map(describe, runs.ours))}"
    )
    theirs, ours = (list(map(of, each)) for each in (runs.theirs, runs.ours))
    measured = in_pairs(theirs, ours, unit, runs.counts_agree and same == all_of_them, note)
    rival = "" if setting.against is None else setting.against.url
    return replace(measured, difference=f"{told}; {ADVICE}", rival=rival)


@lru_cache(maxsize=1)
def _runs(setting: Setting, shape: Shape) -> Runs:
    """Minutes with a model of use, so that rows share them."""
    rival: Open = serve_processes.transformers_serve
    if setting.against is not None:
        rival = partial(_elsewhere, setting.against)
    runs = Runs([], [])
    for number in range(setting.repeats):
        load = list(requests(setting, shape, number))
        turns = [(runs.theirs, rival), (runs.ours, serve_processes.ours)]
        for found, server in in_turn(number, turns):
            found.append(_run(setting, server, load))
    return runs


def _elsewhere(endpoint: Endpoint, setting: Setting) -> AbstractContextManager[Target]:
    return serve_processes.elsewhere(endpoint)


def _run(setting: Setting, server: Open, load: list[Request]) -> Run:
    with server(setting) as target:
        warm = [Send(0.0, target.ask(f"Warm up {index}: {load[index].prompt}", 2)) for index in range(WARM_UP)]
        play(target.url, warm, target.headers)
        sends = [Send(request.at, target.ask(request.prompt, request.new)) for request in load]
        return Run(play(target.url, sends, target.headers), load)


def requests(setting: Setting, shape: Shape, number: int) -> Iterator[Request]:
    """`shape.batch` of them: texts of a sixteenth of `shape.prompt` tokens to all of it, answers of an eighth of
    `shape.new` to all of it; times between them as of a Poisson process. Each `number` has its own.
    """
    assert setting.tokenizer is not None
    rng = random.Random(SEED + number)
    salt = "" if setting.against is None else f".{setting.against.salt}"
    at = 0.0
    for index in range(shape.batch):
        length = rng.randint(max(shape.prompt // SPREAD, 2), shape.prompt)
        new = rng.randint(max(shape.new // SHORTEST_ANSWER, 1), shape.new)
        yield Request(at, _text(setting, f"{number}.{index}{salt}", index, length), new)
        at += rng.expovariate(setting.rate)


def _text(setting: Setting, name: str, index: int, length: int) -> str:
    """About `length` tokens of prose that no other text begins with."""
    assert setting.tokenizer is not None
    text: str = setting.tokenizer.decode(prose_ids(setting.tokenizer, name, index, length))
    return text
