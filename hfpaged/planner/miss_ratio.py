"""Hits of the prefix cache by the size of the pool, all sizes at once, from one pass over a trace.

A least-recently-used cache of C chunks holds the C that were touched last, so a chunk is found in all caches that are
at least as large as its stack distance: the number of different chunks touched since, itself included (Mattson, Gecsei,
Slutz and Traiger 1970, "Evaluation techniques for storage hierarchies"). Distances are counted by a Fenwick tree
(1994, "A new data structure for cumulative frequency tables"): O(log n) for each stretch of chunks that an earlier
request touched together, not for each chunk.

    request 1 touches   a b c d       A request touches its chunks from the last to the first, so that a prefix is more
    request 2 touches   a b e         recent than what follows it, and a cache loses the ends first, as the pool does.
    the stack is then   a b e c d     Live chunks of request 1 are c and d: always the ones behind those touched again.

A hash may stand for many blocks, of which answers and the ends of prompts fill some only: stretches are counted in
pieces of a block, or of what else divides both.

Exact for such a cache, which differs from the real pool in that all of a request is there from the moment it comes:
nothing is pinned by requests that run, and nobody waits or is preempted for want of blocks. A replay knows all that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd

from hfpaged.planner.trace import Trace, TraceRequest

TELL_EVERY = 10_000  # requests


@dataclass(frozen=True)
class MissRatioCurve:
    """Found tokens by the size of the cache in chunks of `chunk` tokens, the pieces that it was counted in. Between two
    of the sizes in `ends` each chunk more finds `rates` tokens more; `sums` have been found up to there.
    """

    chunk: int
    prompt_tokens: int
    ends: Sequence[int]
    rates: Sequence[int]
    sums: Sequence[int]

    def hit_tokens(self, chunks: int) -> int:
        """Of all prompts, with a cache of so many chunks."""
        index = bisect_right(self.ends, chunks) - 1
        if index < 0:
            return 0
        return self.sums[index] + self.rates[index] * (chunks - self.ends[index])

    def hit_ratio(self, chunks: int) -> float:
        """Share of the prompts' tokens that are found."""
        return self.hit_tokens(chunks) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def enough(self) -> int:
        """Chunks of the smallest cache that finds as much as one without end."""
        return self.ends[-1] if self.ends else 0

    @property
    def most(self) -> float:
        """Share that a cache without end finds."""
        return self.hit_ratio(self.enough)


def miss_ratio_curve(
    trace: Trace, told: Callable[[int], None] | None = None, *, block_size: int | None = None
) -> MissRatioCurve:  # fmt: skip
    """The curve of a trace, by blocks of `block_size` tokens, or by whole chunks. `told` is called now and then with
    the requests that are done.
    """
    piece = gcd(trace.chunk, block_size or trace.chunk)
    stack = _Stack(len(trace.requests), piece, trace.chunk // piece)
    for index, request in enumerate(trace.requests):
        stack.touch(index, request)
        if told is not None and index % TELL_EVERY == 0:
            told(index)
    return _curve(trace, piece, stack.gains)


def _curve(trace: Trace, piece: int, gains: dict[int, int]) -> MissRatioCurve:
    """From the distances at which the tokens per piece change to a curve: a piece at distance d is found from d on."""
    ends = [distance - 1 for distance in sorted(gains)]
    rates = list(accumulate(gains[end + 1] for end in ends))
    steps = [rate * (after - end) for rate, end, after in zip(rates, ends, ends[1:], strict=False)]
    return MissRatioCurve(piece, trace.prompt_tokens, ends, rates, [0, *accumulate(steps)][: len(ends)])


class _Stack:
    """What requests have touched, as one run of pieces for each: `size` pieces, of which those before `first` have been
    touched by a later one. A chunk, which a hash stands for, is `per_chunk` pieces of `piece` tokens. `gains` are
    differences of tokens found, by distance in pieces.
    """

    def __init__(self, requests: int, piece: int, per_chunk: int) -> None:
        self._piece, self._per_chunk = piece, per_chunk
        self._run_of: dict[int, int] = {}
        self._first = [0] * requests
        self._live = FenwickTree(requests)
        self.gains: dict[int, int] = defaultdict(int)

    def touch(self, run: int, request: TraceRequest) -> None:
        """Note the distances of a request's chunks, then bring them to the top."""
        runs = list(map(self._run_of.get, request.hashes))
        found, last = self._note(runs)
        excess = found * self._piece - max(request.prompt_tokens - 1, 0)  # one token is always computed
        if found and excess > 0:
            self._lose(last, min(excess, self._piece * self._per_chunk))
        size = -(-(request.prompt_tokens + request.output_tokens) // self._piece)
        size += max(request.n - 1, 0) * -(-request.output_tokens // self._piece)
        hashes = request.hashes + request.answer_hashes
        self._take(runs + list(map(self._run_of.get, request.answer_hashes)))
        self._run_of.update(dict.fromkeys(hashes, run))
        self._live.add(run, max(size, len(hashes) * self._per_chunk))

    def _note(self, runs: Sequence[int | None]) -> tuple[int, int]:
        """Gains of the leading chunks that are known; how many pieces they are, and the distance of the last."""
        depth, distance = 0, 0
        for run, group in groupby(runs):
            if run is None:
                break
            count = len(list(group)) * self._per_chunk
            distance = self._live.after(run) + depth - self._first[run] + 1
            self._gain(distance, count, self._piece)
            depth, distance = depth + count, distance + count - 1
        return depth, distance

    def _lose(self, last: int, tokens: int) -> None:
        """Of the pieces that end at distance `last`, the last `tokens` tokens are not found."""
        whole, rest = divmod(tokens, self._piece)
        self._gain(last - whole + 1, whole, -self._piece)
        self._gain(last - whole, 1, -rest)

    def _gain(self, distance: int, count: int, tokens: int) -> None:
        self.gains[distance] += tokens
        self.gains[distance + count] -= tokens

    def _take(self, runs: Sequence[int | None]) -> None:
        """Take chunks out of the runs that had them."""
        depth = 0
        for run, group in groupby(runs):
            count = len(list(group)) * self._per_chunk
            depth += count
            if run is not None:
                self._first[run] = depth
                self._live.add(run, -count)


class FenwickTree:
    """Numbers at 0 to size - 1, all 0 at first. Both changing one and summing cost O(log size)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, amount: int) -> None:
        sums, place, end = self._sums, index + 1, len(self._sums)
        while place < end:
            sums[place] += amount
            place += place & -place
        self._total += amount

    def after(self, index: int) -> int:
        """The sum of all behind `index`."""
        sums, place, before = self._sums, index + 1, 0
        while place:
            before += sums[place]
            place &= place - 1
        return self._total - before
