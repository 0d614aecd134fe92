"""Which replica a request goes to: pure functions of what is known of each."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hfpaged.errors import InvalidConfigError

SHORT_QUEUE = 2  # requests that may wait at any replica


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When the longest match does not win. Raises InvalidConfigError.

    gain      A match counts as longer by at least this share of the prompt. Below it a forward is hardly shorter, and
              what all prompts of a service begin with would draw all of them to the replica that had the first one.
    queue   A replica where more requests wait than this share of its seats, and more than two, is passed over: they
              wait for about that share of the time of one answer, against that of a forward. Two, as an engine counts
              requests a little longer than they last.
    ratio, slack   A replica with more than `ratio` times the requests of the least loaded one, and `slack` more, is
              passed over: each step of a batch of twice as many takes longer for all of them, every token of theirs,
              where a prefix is computed once; below `slack` requests a step takes about as long as for one.
    free      A replica with less of its pool free (what nobody holds, cached prefixes among it) is passed over: what
              comes waits there for blocks, or takes those of others, which are computed twice then.
    """

    gain: float = 0.1
    queue: float = 0.25
    ratio: float = 2.0
    slack: int = 8
    free: float = 0.05

    def __post_init__(self) -> None:
        shares = {"gain": self.gain, "queue": self.queue, "free": self.free}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise InvalidConfigError(f"{name}={share} is a share; use a number from 0 to 1")
        if self.ratio < 1 or self.slack < 0:
            raise InvalidConfigError(
                f"ratio={self.ratio} and slack={self.slack} pass over the least loaded too; use 1, 0 or more"
            )


class Candidate(NamedTuple):
    """A replica, for one request.

    matched   blocks of the prompt that it knows
    load      requests that it has
    seats     sequences that it computes at once, None where that is not known
    most      requests that it takes: to one more it answers 429
    free      the share of its pool that nobody holds
    placed    hashes of other prompts that were lately sent there
    """

    name: str
    matched: int = 0
    load: int = 0
    seats: int | None = None
    most: float = math.inf
    free: float = 1.0
    placed: int = 0


def ranked(
    candidates: Iterable[Candidate], num_blocks: int, thresholds: Thresholds, rng: random.Random
) -> list[Candidate]:
    """The best first, for a prompt of `num_blocks` full blocks: the longest match where there is room, among those with
    about as long a one the less loaded of two taken by chance, so that many who choose by the same old figures do not
    all choose the same. Those without room are the last.
    """
    known = list(candidates)
    roomy = _roomy(known, thresholds)
    full = [each for each in known if each not in roomy]
    if not roomy:
        return []
    longest = max(each.matched for each in roomy)
    worth = max(thresholds.gain * num_blocks, 1)
    best = [each for each in roomy if longest - each.matched < worth]
    pressure = _pressures(known, thresholds.slack)
    first = min(rng.sample(best, min(2, len(best))), key=pressure.__getitem__)
    rest = sorted((each for each in best if each != first), key=pressure.__getitem__)
    others = sorted((each for each in roomy if each not in best), key=lambda each: (-each.matched, pressure[each]))
    return [first, *rest, *others, *sorted(full, key=pressure.__getitem__)]


def _roomy(known: list[Candidate], thresholds: Thresholds) -> list[Candidate]:
    """Those that are not passed over. Where no replica has room, all that take more are taken for equally full."""
    taking = [each for each in known if each.load < each.most] or known
    least = min((each.load for each in taking), default=0)
    even = [each for each in taking if each.load <= thresholds.ratio * least + thresholds.slack]
    return [each for each in even if not _is_full(each, thresholds)] or even


def _is_full(candidate: Candidate, thresholds: Thresholds) -> bool:
    waiting = candidate.load - candidate.seats if candidate.seats is not None else 0
    return waiting > max(thresholds.queue * (candidate.seats or 0), SHORT_QUEUE) or candidate.free < thresholds.free


def _pressures(known: list[Candidate], slack: int) -> dict[Candidate, float]:
    """Of each replica its shares of all requests, of which `slack` hardly weigh, and of all that was lately sent: what
    comes after a prefix follows it, so that where prefixes are in even numbers loads stay even.
    """
    load = sum(each.load + slack for each in known) or 1
    placed = sum(each.placed for each in known) or 1
    return {each: (each.load + slack) / load + each.placed / placed for each in known}
