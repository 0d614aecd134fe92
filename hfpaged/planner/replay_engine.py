"""The engine of a replay: the scheduler, the pool and the prefixes of a server, on a time that a cost model moves."""

from __future__ import annotations

from hfpaged.block_hash import ExtraKey
from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.clock import VirtualTime
from hfpaged.engine.limits import Limits
from hfpaged.engine.pacing import Pace
from hfpaged.engine.request import SequenceGroup, SequenceState
from hfpaged.engine.samples import fork_samples
from hfpaged.engine.schedule import Scheduled
from hfpaged.planner.cost_model import CostModel, context_of
from hfpaged.planner.replay_request import ReplayRequest
from hfpaged.planner.replay_scheduler import ReplayScheduler, Sleepers
from hfpaged.planner.replay_stats import ReplayStats
from hfpaged.planner.variant import Variant
from hfpaged.prefix_cache import PrefixCache


class ReplayEngine:
    """Steps as hfpaged.engine.core.Engine makes them, but for the forward. `lets_sleep` makes it faster, and nothing
    else of it different.
    """

    def __init__(self, variant: Variant, cost: CostModel, time: VirtualTime, *, lets_sleep: bool = True) -> None:
        windows = variant.windows
        self.variant, self._cost, self._time = variant, cost, time
        self.pool = BlockPool(variant.num_blocks)
        self.manager = BlockManager(self.pool, len(windows), variant.block_size, windows)
        self.prefixes = PrefixCache(self.manager, windows, _quick_hash, remembered=0)
        self.root = self.prefixes.index.root([ExtraKey("model", "")]) if variant.prefix_sharing else None
        limits = Limits(variant.max_num_seqs, variant.max_num_batched_tokens, variant.watermark)
        self.scheduler = ReplayScheduler(self.manager, self.prefixes, windows, limits, by_priority=variant.by_priority)
        self.sleepers = self.scheduler.sleepers = Sleepers(windows)
        self._lets_sleep = lets_sleep
        self.stats = ReplayStats(variant.block_size, len(windows))
        self._pace = Pace(variant.max_num_batched_tokens, variant.max_step_stretch)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_in_flight(self) -> int:
        return self.scheduler.num_running + len(self.scheduler.waiting)

    @property
    def num_requests(self) -> int:
        """In flight, where several samples are one."""
        return self.stats.arrived - self.stats.refused - self.stats.too_long - self.stats.finished

    @property
    def num_over(self) -> int:
        """Requests that have ended or were refused."""
        return self.stats.arrived - self.num_requests

    @property
    def parts(self) -> list[ReplayStats]:
        """By replica: of this one."""
        return [self.stats]

    def add(self, request: ReplayRequest) -> None:
        """A request begins to wait, or is refused as a server would refuse it."""
        variant, request.root = self.variant, self.root
        self.stats.arrived += 1
        most = variant.max_num_queued_requests
        if most is not None and self.num_in_flight >= variant.max_num_seqs + most:
            self.stats.refused += 1
            return
        prompt = request.num_prompt_tokens
        seats = request.groups[0].seats
        if self.scheduler.needs.at_most(prompt, request.total - prompt) > variant.num_blocks or (
            seats > variant.max_num_seqs
        ):
            self.stats.too_long += 1
            return
        self.scheduler.add(request.groups[0])

    def step(self, until: float | None) -> None:
        """One step, or as many as have nobody awake in them. `until` is when the next request comes."""
        self.scheduler.begin_step()
        if self.scheduler.running or len(self.scheduler.waiting):
            self._step()
        else:
            self._sleep_on(until)

    def _step(self) -> None:
        scheduler, stats, asleep = self.scheduler, self.stats, self.sleepers
        schedule = scheduler.schedule(self._pace.budget(self._count_decoding()))
        for admission in schedule.admitted:
            stats.admitted(admission, self._time.seconds)
        for group, lost in schedule.preempted:
            stats.preempted(group, lost, self._time.seconds)
        work, decodes = schedule.work, schedule.num_decodes + asleep.count
        assert schedule.stuck is None, "nobody else holds blocks of this pool"
        assert work or asleep.count or schedule.preempted, "a step that does nothing would last for ever"
        self.manager.grow(schedule.growth)
        seconds = self._take_time(schedule.num_prefill_tokens, decodes, self._context(work))
        for each in work:
            scheduler.computed(each, each.count)
        stats.stepped(len(work) + asleep.count, schedule.num_prefill_tokens, decodes, seconds, self.pool.num_used)
        scheduler.end_step()
        if stats.is_due:
            self._look(work, seconds)
        self._sample(work)
        if self._lets_sleep:
            scheduler.put_to_sleep(work)

    def _sleep_on(self, until: float | None) -> None:
        """Steps of sleepers alone, until one of them wakes or somebody comes."""
        asleep, used = self.sleepers, self.pool.num_used
        self.scheduler.clock.tell(None)
        while asleep.step < asleep.next_step:
            seconds = self._take_time(0, asleep.count, 0)
            self.stats.stepped(asleep.count, 0, asleep.count, seconds, used)
            self.scheduler.end_step()
            if self.stats.is_due:
                self._look([], seconds)
            if until is not None and self._time.seconds >= until:
                return

    def _take_time(self, prefill: int, decodes: int, context: int) -> float:
        """What a step takes that reads `context` stored tokens, in all groups, besides those of sleepers."""
        context += self.sleepers.context
        seconds = self._cost.seconds(prefill, decodes, context / len(self.variant.windows))
        self._time.seconds += seconds
        self._pace.told(decodes, prefill, seconds)
        self.stats.gap(seconds, decodes)
        return seconds

    def _sample(self, work: list[Scheduled]) -> None:
        """Each sequence that was computed gets its next token, and goes if that was its last."""
        stats, now = self.stats, self._time.seconds
        ended: list[tuple[ReplayRequest, SequenceGroup]] = []
        for group, seq, _, _, samples in work:
            if not samples:
                continue
            request = group.request
            assert isinstance(request, ReplayRequest)
            if len(seq.tokens) == request.num_prompt_tokens and not seq.index:
                stats.first_token(request, now)
            elif request.last_token_time is not None:
                stats.next_token(request, now)
            if group.seats > len(group.sequences):
                for child in fork_samples(group, self.manager, self.scheduler, _as_it_is):
                    if self._takes_token(child):
                        ended.append((request, _group_of(request, child)))
            elif self._takes_token(seq):
                ended.append((request, group))
        for request, group in ended:
            self._end(request, group)

    def _takes_token(self, seq: SequenceState) -> bool:
        """Whether that was its last one."""
        request = seq.request
        assert isinstance(request, ReplayRequest)
        seq.tokens.extend(request.next_tokens(seq, 1))
        return len(seq.tokens) >= request.total

    def _end(self, request: ReplayRequest, group: SequenceGroup) -> None:
        request.groups.remove(group)
        self.scheduler.remove(group)
        if not request.groups:
            self.stats.ended(request, self._time.seconds)
            request.sequences.clear()  # which know the request: no circle is left to be found by the garbage collector

    def _context(self, work: list[Scheduled]) -> int:
        """Stored tokens that this step reads, those that it stores among them; they have their slots by now."""
        return context_of([each.seq.num_computed for each in work], self.variant.windows)

    def _look(self, work: list[Scheduled], seconds: float) -> None:
        """What the last blocks of those who run leave empty."""
        lengths = [each.seq.num_computed for each in work] + [length for _, length in self.sleepers]
        self.stats.look(lengths, seconds, self.pool.num_used)

    def _count_decoding(self) -> int:
        if self.variant.max_step_stretch is None:
            return 1
        return self.sleepers.count + sum(group.is_decoding for group in self.scheduler.running)


def _quick_hash(data: bytes) -> bytes:
    """Tokens are compared besides, and nobody else can choose them here."""
    return hash(data).to_bytes(8, "little", signed=True)


def _as_it_is(seq: SequenceState) -> SequenceState:
    return seq


def _group_of(request: ReplayRequest, seq: SequenceState) -> SequenceGroup:
    return next(group for group in request.groups if group.sequences[0] is seq)
