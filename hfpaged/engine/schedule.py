"""One step as it was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hfpaged.engine.request import SequenceGroup, SequenceState
from hfpaged.prefix_index import Match
from hfpaged.sequence import Sequence


class Scheduled(NamedTuple):
    """`count` tokens of a sequence from `start` on, its draft among them; whether the next one is sampled then."""

    group: SequenceGroup
    seq: SequenceState
    start: int
    count: int  # type: ignore[assignment]
    samples: bool


class Admission(NamedTuple):
    """A group begins with `match`, which has `found` tokens, after it waited for `waits` (seconds by cause)."""

    group: SequenceGroup
    match: Match
    found: int
    waits: dict[str, float]


@dataclass
class Schedule:
    """What a step computes, decodes first, and what was decided on the way.

    num_decodes, num_prefill_tokens   how many works are decodes, and how many tokens the others have
    prefills   the works that are no decodes
    admitted   groups that begin
    preempted  groups that lost their blocks, with the tokens that were in them
    stuck      a group that finds no blocks although no other group holds any
    """

    work: list[Scheduled] = field(default_factory=list)
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    prefills: list[Scheduled] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[tuple[SequenceGroup, int]] = field(default_factory=list)
    stuck: SequenceGroup | None = None

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)

    @property
    def growth(self) -> list[tuple[Sequence, int]]:
        """By how many tokens each sequence grows."""
        return [(work.seq.blocks, work.count) for work in self.work if work.seq.blocks is not None]

    def context(self, windows: tuple[int | None, ...]) -> int:
        """Stored tokens that attention reads, in the mean of the layer groups with these windows."""
        lengths = [work.start + work.count for work in self.work]
        if not any(windows):
            return sum(lengths)
        return sum(min(length, window or length) for length in lengths for window in windows) // len(windows)

    def drop_drafts(self) -> bool:
        """Verify nothing in this step; whether there was something."""
        decodes = self.work[: self.num_decodes]
        had_some = any(work.count > 1 for work in decodes)
        for work in decodes:
            work.seq.draft = []
        self.work[: self.num_decodes] = [work._replace(count=1) for work in decodes]
        return had_some

    def drop_last_prefill(self) -> bool:
        """Leave the last prompt out of this step, unless nothing would be left to be computed then."""
        if len(self.work) == self.num_decodes:
            return False
        last = self.work[-1].group
        others = [work for work in self.work if work.group is not last]  # of beams all or none
        self.work = others or self.work
        return bool(others)

    def drop(self, group: SequenceGroup) -> None:
        """Compute nothing of a group."""
        self.num_decodes -= sum(work.group is group for work in self.work[: self.num_decodes])
        self.work = [work for work in self.work if work.group is not group]

    def sort(self) -> None:
        """Single tokens first, side by side those of one adapter, and of these who read the same blocks first: they are
        read once. Nothing is dropped any more then.
        """
        self.prefills = self.work[self.num_decodes :]
        self.num_prefill_tokens = sum(work.count for work in self.prefills)
        self.work.sort(key=_place)


def _place(work: Scheduled) -> tuple[bool, str, int]:
    blocks, adapter = work.seq.blocks, work.group.request.adapter or ""
    return work.count != 1, adapter, blocks.tables[0].blocks[0] if blocks and blocks.tables[0].blocks else -1
