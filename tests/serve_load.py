"""Random load on a server by many clients at once, for so many seconds. What each of them sends follows from the seed.

Against any server of serve_load_worker.py: python tests/serve_load.py PORT SECONDS [SEED]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import psutil
from load_http import POLITE, Reply, exchange, request_bytes
from serve_load_kinds import KINDS, PATHS, WEIGHTS, Attempt, attempt

CLIENTS = 24
SAMPLE_SECONDS = 0.25
CUT_SHORT = b'"code":"request_timeout"'  # a stream that took too long has begun with 200, and ends with this event
MOST_FAULTS = 20  # more of the same tell nothing


class Sample(NamedTuple):
    """Of the server's process, after so many requests."""

    requests: int
    resident_bytes: int
    open_files: int
    threads: int


class Load:
    """`kinds` are those that the server has a path for, `seen[kind][status]` counts answers, `answers[i]` are the texts
    that came for the i-th greedy prompt, `faults` are what must not be.
    """

    def __init__(self, port: int, pid: int | None = None, seed: int = 0) -> None:
        self._port, self._seed = port, seed
        self._process = None if pid is None else psutil.Process(pid)
        self.kinds: list[str] = []
        self.seen: dict[str, Counter[int | None]] = defaultdict(Counter)
        self.answers: dict[int, set[str]] = defaultdict(set)
        self.faults: list[str] = []
        self.samples: list[Sample] = []

    @property
    def requests(self) -> int:
        """That have ended, in whatever way."""
        return sum(sum(counter.values()) for counter in self.seen.values())

    def run(self, seconds: float, clients: int = CLIENTS) -> None:
        """Returns when the last client has ended its last request."""
        asyncio.run(self._run(seconds, clients))

    async def _run(self, seconds: float, clients: int) -> None:
        self.kinds = await self._served_kinds()
        end = time.monotonic() + seconds
        sampling = asyncio.ensure_future(self._sample())
        try:
            await asyncio.gather(*(self._client(number, end) for number in range(clients)))
        finally:
            sampling.cancel()

    async def _served_kinds(self) -> list[str]:
        """Those whose path the server has."""
        reply = await exchange(self._port, request_bytes("GET", "/openapi.json"))
        paths = set(reply.json["paths"])
        return [kind for kind in KINDS if kind not in PATHS or PATHS[kind] in paths]

    async def _client(self, number: int, end: float) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        weights = [WEIGHTS.get(kind, 1.0) for kind in self.kinds]
        while time.monotonic() < end and len(self.faults) < MOST_FAULTS:
            await self._try(attempt(rng.choices(self.kinds, weights)[0], rng))
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.02, 0.2)))

    async def _try(self, made: Attempt) -> None:
        try:
            reply = await exchange(self._port, made.request, made.manner)
        except TimeoutError as error:
            self._fault(made, str(error))
            return
        self.seen[made.kind][reply.status] += 1
        if reply.status not in made.allowed:
            self._fault(made, f"status {reply.status}: {reply.body[:300]!r}")
        elif reply.status is not None and made.manner == POLITE and CUT_SHORT not in reply.body:
            self._look(made, reply)

    def _look(self, made: Attempt, reply: Reply) -> None:
        try:
            made.check(reply)
            if reply.status >= 400:
                assert set(reply.json["error"]) == {"message", "type", "param", "code"}
            elif made.greedy is not None:
                self.answers[made.greedy].add(text_of(reply))
        except Exception as error:
            self._fault(made, f"{error!r}: {reply.body[:300]!r}")

    def _fault(self, made: Attempt, what: str) -> None:
        head, _, body = made.request.partition(b"\r\n\r\n")
        self.faults.append(f"{made.kind}, {head.splitlines()[0]!r} {body[:200]!r}: {what}")

    async def _sample(self) -> None:
        while self._process is not None:
            with self._process.oneshot():
                memory, files, threads = (
                    self._process.memory_info(),
                    self._process.num_fds(),
                    self._process.num_threads(),
                )
            self.samples.append(Sample(self.requests, memory.rss, files, threads))
            await asyncio.sleep(SAMPLE_SECONDS)


def text_of(reply: Reply) -> str:
    """Of the first choice of a completion, whole or streamed."""
    if reply.body.startswith(b"data: "):
        return "".join(choice["text"] for event in reply.events for choice in event["choices"])
    text: str = reply.json["choices"][0]["text"]
    return text


def slope(samples: list[Sample], of: Callable[[Sample], float]) -> float:
    """How much `of` grows with each request, by least squares."""
    xs, ys = [float(sample.requests) for sample in samples], [float(of(sample)) for sample in samples]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def main() -> None:
    load = Load(int(sys.argv[1]), seed=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    load.run(float(sys.argv[2]))
    print(
        json.dumps(
            {kind: {str(key): n for key, n in sorted(seen.items(), key=str)} for kind, seen in load.seen.items()}
        )
    )
    print(*load.faults, sep="\n")


if __name__ == "__main__":
    main()
