"""What goes into the next step: decodes first, then prompts in chunks, then whoever is next and has room.

Iteration-level scheduling as in Orca (Yu et al. 2022, OSDI), chunked prefill as in Sarathi-Serve (Agrawal et al. 2024,
arXiv 2403.02310). It knows blocks and tokens, no tensor.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterator

from hfpaged.block_manager import BlockManager
from hfpaged.clock import now
from hfpaged.engine.admitter import Admitter
from hfpaged.engine.block_needs import BlockNeeds
from hfpaged.engine.limits import Limits
from hfpaged.engine.preemption import PreemptionPolicy, least_computed_first
from hfpaged.engine.request import SequenceGroup
from hfpaged.engine.schedule import Admission, Schedule, Scheduled
from hfpaged.engine.waiting_queue import WaitingQueue
from hfpaged.engine.waits import Cause, WaitClock, Waiting, plus
from hfpaged.prefix_cache import PrefixCache
from hfpaged.prefix_index import Match


class Scheduler:
    """Queues, and the blocks of all groups. Call it under the lock of the pool.

    Why somebody always comes to his end: with `least_computed_first` the group of the best priority that has had the
    most work is never preempted while there are others, decodes go before prompts, and each decode is a token that no
    preemption takes back.
    """

    def __init__(
        self, manager: BlockManager, prefixes: PrefixCache, windows: tuple[int | None, ...], limits: Limits, *,
        by_priority: bool = False, policy: PreemptionPolicy = least_computed_first,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.waiting = WaitingQueue(by_priority)
        self.running: list[SequenceGroup] = []  # best first
        self.clock = WaitClock()
        longest = None if limits.whole_prompts else limits.max_num_batched_tokens
        self.needs = BlockNeeds(windows, manager.block_size, longest)
        self._admitter = Admitter(manager, prefixes, self.needs, limits.watermark)
        self._manager, self._pool, self._prefixes, self._policy = manager, manager.pool, prefixes, policy

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, group: SequenceGroup) -> None:
        """A new group waits."""
        group.waiting.begin(self.clock)
        self.waiting.add(group)

    def replace(self, group: SequenceGroup, others: list[SequenceGroup]) -> None:
        """A running group goes on as several: the samples of one prompt."""
        self.running.remove(group)
        self._admitter.promises.withdraw(group)
        for other in others:
            insort(self.running, other, key=self.waiting.rank)
        self.waiting.left(group, 1 - len(others))

    def remove(self, group: SequenceGroup) -> None:
        """A group has ended: its blocks go back, wherever it stood."""
        if group in self.running:
            self.running.remove(group)
            self.waiting.left(group)
        elif self.waiting.discard(group):
            self._end_wait(group)
        self._free(group)

    def preempt(self, group: SequenceGroup) -> None:
        """Take the blocks of a running group back; it waits at the front."""
        group.request.look_at_memory(self._pool)
        self.running.remove(group)
        self._free(group)
        group.was_preempted, group.waited_for = True, None
        group.waiting = Waiting(now())
        group.request.preemptions += 1
        self.add(group)
        self.waiting.left(group)  # after that: its tenant was here all the time

    def schedule(self, prefill_budget: int) -> Schedule:
        """The next step, with at most `prefill_budget` tokens of prompts."""
        schedule = Schedule()
        decoding = [group for group in self.running if group.is_decoding]
        budget = min(self._plan_decodes(schedule, decoding), prefill_budget)
        if len(decoding) < len(self.running):
            budget = self._plan_prefills(schedule, budget)
        whole = len(schedule.work)
        self._settle_shortage(schedule)
        is_short = len(schedule.work) < whole or bool(schedule.preempted)
        self.clock.tell("blocks" if is_short else self._admit(schedule, budget) if len(self.waiting) else None)
        schedule.sort()
        return schedule

    def computed(self, work: Scheduled, count: int) -> None:
        """The step stored `count` of these tokens: what became full is published, what left a window goes back."""
        group, blocks, tokens = work.group, work.seq.blocks, work.seq.tokens
        assert blocks is not None
        group.work += count
        group.request.computed_tokens += count
        self.waiting.charge(group.request.tenant, count)
        length = blocks.tables[0].length
        if blocks.chain is not None:
            blocks.chain.items.extend(tokens[length - count : length])
        if length % self._manager.block_size < count:
            self._prefixes.publish(blocks, origin=group.request.origin)
            self._admitter.promises.progress(group, length)
            group.request.look_at_memory(self._pool)
        if self._manager.has_windows:
            self._manager.release_left([blocks])

    def give_back(self, manager: BlockManager) -> None:
        """Whoever made the steps is gone: nobody will end what is running."""
        for group in self.running:
            self._free(group)
        self.running = []

    def _plan_decodes(self, schedule: Schedule, decoding: list[SequenceGroup]) -> int:
        """All that wait for nothing but their next token; returns what is left of the token budget."""
        decodes = [(group, seq) for group in decoding for seq in group.sequences]
        spare = self.limits.max_num_batched_tokens - len(decodes)
        for group, seq in decodes:
            if seq.draft:
                seq.draft = seq.draft[:spare]
                spare -= len(seq.draft)
            schedule.work.append(Scheduled(group, seq, seq.num_computed, 1 + len(seq.draft), True))
        schedule.num_decodes = len(decodes)
        return spare

    def _plan_prefills(self, schedule: Schedule, budget: int) -> int:
        for group in self.running:
            if not group.is_decoding and budget > 0:
                for work in self._chunks(group, self._room(schedule, budget)):
                    schedule.work.append(work)
                    budget -= work.count
        return budget

    def _room(self, schedule: Schedule, budget: int) -> int:
        """Tokens that the next prompt may bring: any number, where it must be whole and is the first in its step."""
        is_first = len(schedule.work) == schedule.num_decodes
        return sys.maxsize if self.limits.whole_prompts and is_first else budget

    def _chunks(self, group: SequenceGroup, budget: int) -> Iterator[Scheduled]:
        """The next tokens of a group that cannot sample yet. Of beams one at a time, as the others begin with what it
        publishes, and all but the last token of each: that is computed for all at once.
        """
        kept_back = 0 if len(group.sequences) == 1 else 1
        for seq in group.sequences:
            if seq.blocks is None:
                self._admitter.begin(seq)
            left = seq.num_left - kept_back
            if left > 0:
                count = min(left, budget, self.limits.logits_of(group.request))
                if count < left and self.limits.whole_prompts:
                    return
                yield Scheduled(group, seq, seq.num_computed, count, count == left and not kept_back)
                return
        if len(group.sequences) <= budget:  # what is known of the last beams was all of them
            yield from (Scheduled(group, seq, seq.num_computed, 1, True) for seq in group.sequences)

    def _settle_shortage(self, schedule: Schedule) -> None:
        """Where blocks are short, drafts are dropped, then prompts wait for decodes, then somebody is preempted."""
        while schedule.work and not self._has_blocks(schedule):
            if schedule.drop_drafts() or schedule.drop_last_prefill():
                continue
            if len(self.running) == 1:
                schedule.stuck, schedule.work = self.running[0], []
                return
            lowest = max(map(self.waiting.priority, self.running))
            victim = self._policy([group for group in self.running if self.waiting.priority(group) == lowest])
            schedule.drop(victim)
            schedule.preempted.append((victim, victim.num_computed))
            self.preempt(victim)

    def _has_blocks(self, schedule: Schedule) -> bool:
        growth = schedule.growth
        return self._manager.can_surely_grow(growth) or self._manager.can_grow(growth)

    def _admit(self, schedule: Schedule, budget: int) -> Cause | None:
        """Let in who is next, as long as there are seats, tokens of the budget and blocks; what others wait for."""
        seats = self.limits.max_num_seqs - self._seats_taken()
        if budget <= 0 or seats <= 0:
            return "seats" if seats <= 0 else "budget"
        reserved, taken = self._reserved(), None
        passed = 0
        for group in self.waiting.in_order():
            # Who waits for a prefix is asked again at each step, so that not all of a long queue may be passed by.
            if budget <= 0 or group.seats > seats or passed > self.limits.max_num_seqs:
                return "budget" if budget <= 0 else "seats" if group.seats > seats else "prefix"
            match = self._admitter.match(group)
            awaited = self._admitter.awaited(group, match)
            if awaited is not None:
                group.waited_for = awaited.request.request_id
            if awaited is not None or self._admitter.is_coming(group, match):
                self.clock.await_prefix(group.waiting)
                passed += 1
                continue
            if self.limits.whole_prompts and group.sequences[0].num_left > self._room(schedule, budget):
                return "budget"
            needed = self._admitter.needs(group, match)
            if taken is None:  # copies-on-write too, which this step makes before anything that it reserves for later
                taken = self._manager.num_blocks_needed(schedule.growth)
            kept = max(reserved, taken) if seats < self.limits.max_num_seqs else 0
            if needed + kept > self._pool.num_free and not self._is_alone():
                if seats == self.limits.max_num_seqs:  # others hold blocks of the pool, and will not give them back
                    schedule.stuck = group
                return "blocks"
            for work in self._begin(schedule, group, match, self._room(schedule, budget)):
                schedule.work.append(work)
                budget -= work.count
            seats -= group.seats
            reserved, taken = reserved + self._admitter.still(group), taken + needed
        return None

    def _is_alone(self) -> bool:
        # Nobody holds any block, so that waiting brings none: what fits an empty pool begins.
        return not self.running and self._pool.num_used == 0

    def _seats_taken(self) -> int:
        return sum(group.seats for group in self.running)

    def _reserved(self) -> int:
        return self._admitter.reserved(self.running)

    def _begin(self, schedule: Schedule, group: SequenceGroup, match: Match, budget: int) -> Iterator[Scheduled]:
        group.request.look_at_memory(self._pool)
        self.waiting.admit(group)
        insort(self.running, group, key=self.waiting.rank)
        match = self._admitter.begin(group.sequences[0], match)
        found = match.length(self._manager.block_size)
        schedule.admitted.append(Admission(group, match, found, self._end_wait(group)))
        if len(group.sequences) == 1:
            self._admitter.promise(group)
        return self._chunks(group, budget)

    def _end_wait(self, group: SequenceGroup) -> dict[str, float]:
        group.request.waits = plus(group.request.waits, waits := group.waiting.end(self.clock))
        return waits

    def _free(self, group: SequenceGroup) -> None:
        self._admitter.promises.withdraw(group)
        for seq in group.sequences:
            seq.draft = []
            if seq.blocks is not None:
                self._manager.free(seq.blocks)
                seq.blocks = None
