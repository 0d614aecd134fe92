"""A trace: what was asked of a server and when, without any text. `hfpaged serve --record` writes one, as JSON lines.

The first line is a header, then comes a line for each request, in the order in which they ended, and now and then one
for a step. A prompt stands there as its length and one number for each full chunk of its tokens. That number is a keyed
hash of all tokens up to the end of the chunk, under a secret that was made for this recording and thrown away with it:
two prompts that begin alike can be seen to do so, and nobody can test a guessed text against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FORMAT, VERSION = "hfpaged-trace", 1


class TraceRequest(NamedTuple):
    """One request. `arrival` in seconds since the first one of the trace. `hashes` stand for the chunks of the prompt,
    the last of them for a part of one where the trace counts that too; `answer_hashes` for the chunks behind them, as
    far as the answer filled them, where they are known. Of chunk `like[0]`, a new one, the first `like[2]` tokens are
    those of the chunk with hash `like[1]`. What it met when it was recorded, else None: `hits` in tokens of its prompt,
    `ttft` and `duration` in seconds.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()
    answer_hashes: tuple[int, ...] = ()
    tenant: int = 0
    n: int = 1
    priority: int = 0
    adapter: int = 0
    hits: int | None = None
    finish: str | None = None
    ttft: float | None = None
    duration: float | None = None
    like: tuple[int, int, int] | None = None


# Of what a chunk is made: so many tokens each, as in the chunk with that hash.
Runs = tuple[tuple[int, int], ...]


class TraceStep(NamedTuple):
    """One step as it was measured: tokens of prompts, tokens decoded, stored tokens that attention read, seconds."""

    prefill: int
    decodes: int
    context: int
    seconds: float


@dataclass
class Skipped:
    """Lines that could not be read: how many, and the first of them with its number and reason."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str, shown: int = 5) -> None:
        self.count += 1
        if len(self.first) < shown:
            self.first.append((line, reason))


@dataclass
class Trace:
    """A trace as it was read: requests in the order of their arrival; `chunk` is the tokens that one hash stands for.
    `header` is the recording's own, with the settings of its server; empty for traces of others. `runs` are those of
    chunks that begin like others, by their hash.
    """

    requests: list[TraceRequest]
    chunk: int
    skipped: Skipped = field(default_factory=Skipped)
    steps: list[TraceStep] = field(default_factory=list)
    header: Mapping[str, Any] = field(default_factory=dict)
    runs: Mapping[int, Runs] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens * request.n for request in self.requests)

    @property
    def has_hashes(self) -> bool:
        """Whether it says which prompts begin alike; without that there are no hits to be had."""
        return any(request.hashes for request in self.requests)
