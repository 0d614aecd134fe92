"""The scheduler of a server, which lets those sleep who only decode.

A sequence that decodes changes something for others three times in a block: when it takes the block, when it has filled
and publishes it, and when a block leaves its window. In between it is one sequence and one token of each step, and one
token longer after it. That is counted for all sleepers together, and done for each when it wakes:

    steps           1    2    3    4  ...  15   16   17
    tokens stored   16 | 17   18   19      30   31   32 |        block_size 16
                         awake  asleep .........  awake: the block is full, and the next step takes another one
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import Counter
from collections.abc import Iterator

from hfpaged.engine.request import SequenceGroup
from hfpaged.engine.schedule import Schedule, Scheduled
from hfpaged.engine.scheduler import Scheduler
from hfpaged.planner.replay_request import ReplayRequest


class _Short(Exception):
    """Blocks are short for those who are awake."""


class Sleepers:
    """Groups of one sequence that decode. `step` is the number of the coming step; who sleeps from it on wakes for a
    later one. `context`: stored tokens that attention reads of all of them in that step, times the layer groups.
    """

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.step = 0
        self.count = self.reserved = 0
        self.by_tenant: Counter[str] = Counter()
        self._windows = windows
        self._beds: dict[int, dict[SequenceGroup, tuple[int, int]]] = {}  # by step: since when, blocks reserved
        self._growing = self._sum = 0  # tables that attention reads all of: how many, and their lengths at step 0

    @property
    def context(self) -> int:
        return self._sum + self._growing * (self.step + 1)

    @property
    def next_step(self) -> int:
        """For which the next one wakes."""
        return min(self._beds, default=sys.maxsize)

    def __iter__(self) -> Iterator[tuple[SequenceGroup, int]]:
        """Each with the tokens that it has stored by now."""
        for bed in self._beds.values():
            for group, (since, _) in bed.items():
                yield group, group.sequences[0].num_computed + self.step - since

    def add(self, group: SequenceGroup, steps: int, reserved: int) -> None:
        """`group` sleeps for so many steps from the coming one on; it has so many blocks `reserved` meanwhile."""
        self._beds.setdefault(self.step + steps, {})[group] = self.step, reserved
        self._count(group, self.step, 1, reserved)

    def pop(self) -> list[tuple[SequenceGroup, int]]:
        """Who wakes for the coming step, each with the steps that it slept."""
        return self._out(self._beds.pop(self.step, {}))

    def pop_all(self) -> list[tuple[SequenceGroup, int]]:
        """Wake all."""
        beds, self._beds = self._beds, {}
        return [each for bed in beds.values() for each in self._out(bed)]

    def _out(self, bed: dict[SequenceGroup, tuple[int, int]]) -> list[tuple[SequenceGroup, int]]:
        for group, (since, reserved) in bed.items():
            self._count(group, since, -1, reserved)
        return [(group, self.step - since) for group, (since, _) in bed.items()]

    def _count(self, group: SequenceGroup, since: int, one: int, reserved: int) -> None:
        self.count += one
        self.reserved += one * reserved
        self.by_tenant[group.request.tenant] += one
        length = group.sequences[0].num_computed  # as it went to sleep, until it is woken
        for window in self._windows:
            if window is None or length < window:
                self._growing += one
                self._sum += one * (length - since)
            else:
                self._sum += one * window


class ReplayScheduler(Scheduler):
    """`running` are those who are awake. Whoever makes the steps calls `begin_step` before each, and may let groups
    sleep after it.
    """

    sleepers: Sleepers

    @property
    def has_work(self) -> bool:
        return self.sleepers.count > 0 or super().has_work

    @property
    def num_running(self) -> int:
        """Groups, awake or not."""
        return len(self.running) + self.sleepers.count

    def begin_step(self) -> None:
        """Wake who has something to do in the coming step."""
        self._wake(self.sleepers.pop())

    def end_step(self) -> None:
        """The step is made: sleepers have one token more."""
        sleepers = self.sleepers
        for tenant, count in sleepers.by_tenant.items():
            if count:
                self.waiting.charge(tenant, count)
        sleepers.step += 1

    def put_to_sleep(self, works: list[Scheduled]) -> None:
        """Those of `works` who got a token and do nothing but decode for a while sleep from the coming step on."""
        asleep = set()
        for group, seq, _, _, samples in works:
            if samples and seq.blocks is not None and (steps := self._quiet_steps(group)) > 1:
                self.sleepers.add(group, steps, self._admitter.still(group))
                asleep.add(group)
        if asleep:
            self.running = [group for group in self.running if group not in asleep]

    def schedule(self, prefill_budget: int) -> Schedule:
        """As the scheduler of a server does, where all were awake; its works are those of whoever is."""
        try:
            return super().schedule(prefill_budget)
        except _Short:
            self._wake(self.sleepers.pop_all())
            return super().schedule(prefill_budget)

    def _quiet_steps(self, group: SequenceGroup) -> int:
        """For how many steps from the coming one on this group does nothing but grow in its last block."""
        seq, size = group.sequences[0], self._manager.block_size
        assert isinstance(group.request, ReplayRequest)
        assert seq.blocks is not None
        length, tokens = seq.blocks.tables[0].length, len(seq.tokens)
        if length % size == 0 or tokens - length != 1 or group.seats != 1:
            return 0
        steps = min(size - 1 - length % size, group.request.total - tokens - 1)
        for table, window in zip(seq.blocks.tables, self.needs.windows, strict=True):
            if window is not None:
                leaves = (table.first + 1) * size + window - 1  # the length at which a block has left the window
                steps = min(steps, leaves - length - 1, window - length if length < window else steps)
        return 0 if any(table.must_copy(1) for table in seq.blocks.tables) else steps

    def _wake(self, groups: list[tuple[SequenceGroup, int]]) -> None:
        """Do for each what it slept through."""
        for group, count in groups:
            (seq,) = group.sequences
            assert isinstance(group.request, ReplayRequest)
            assert seq.blocks is not None
            seq.tokens.extend(group.request.next_tokens(seq, count))
            for table in seq.blocks.tables:
                table.length += count
            if seq.blocks.chain is not None:
                length = seq.blocks.length
                seq.blocks.chain.items.extend(seq.tokens[length - count : length])
            group.work += count
            group.request.computed_tokens += count
            insort(self.running, group, key=self.waiting.rank)

    def _plan_decodes(self, schedule: Schedule, decoding: list[SequenceGroup]) -> int:
        return super()._plan_decodes(schedule, decoding) - self.sleepers.count

    def _settle_shortage(self, schedule: Schedule) -> None:
        if self.sleepers.count and schedule.work and not self._has_blocks(schedule):
            raise _Short
        super()._settle_shortage(schedule)

    def _seats_taken(self) -> int:
        return super()._seats_taken() + self.sleepers.count

    def _reserved(self) -> int:
        return super()._reserved() + self.sleepers.reserved
