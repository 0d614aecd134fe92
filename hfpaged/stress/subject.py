"""What is stressed: a batcher of the model, and all that runs beside it."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hfpaged.block_pool import BlockPool
from hfpaged.engine import tally_keys as keys
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.errors import IntegrityError
from hfpaged.kv_pool import KVPool
from hfpaged.spread import input_device
from hfpaged.stress.caches import OtherCaches
from hfpaged.stress.facts import Facts, LeakedBlock
from hfpaged.stress.load import Load
from hfpaged.stress.mix import Lengths, Mix, Room
from hfpaged.stress.native import Checker
from hfpaged.stress.verdict import grows
from hfpaged.stress.watch import Watch, heap, trim_heap

HEAP_AT = 0.3  # of the time: looking at the heap takes memory itself, which is part of the warm-up then
LEAST_GROWN = 100  # objects of one type: fewer are noise


@dataclass(frozen=True)
class Plan:
    """How the load is made. Tokens of the longest request (`context`; None: as many as the model takes) and of one on
    average (`length`; None: so that the pool is full).
    """

    seconds: float
    seed: int
    context: int | None
    length: int | None
    kv_dtype: str
    block_size: int


class Stress:
    """One run. `facts` can be had at any moment after `run`, also when that was interrupted."""

    def __init__(
        self, model: PreTrainedModel, batcher: ContinuousBatcher, alphabet: list[int], plan: Plan,
        tell: Callable[[Load], None],
    ) -> None:  # fmt: skip
        self._batcher, self._plan = batcher, plan
        self.pool: KVPool = batcher.pool
        room = Room(self.pool.num_blocks, self.pool.block_size, [group.window for group in self.pool.groups])
        limits = batcher.limits
        longest = min((each for each in (plan.context, limits.get("max_model_len")) if each), default=None)
        rng = random.Random(plan.seed)
        sequences = limits["max_num_seqs"]
        mix = Mix(rng, alphabet, Lengths.filling(room, sequences, longest, plan.length), sequences)
        self.checker = Checker(model, plan.kv_dtype, plan.block_size)
        self._others = OtherCaches(model, self.pool, mix, rng, self.checker)
        self._watch = Watch(self.pool, input_device(model), plan.seconds)
        batcher.hooks.append(self._watch)
        self._load = Load(batcher, mix, self._others, self.checker, self._watch, self._tell_and_count, plan.seconds)
        self._tell = tell
        self._broken: str | None = None
        self._heap: Counter[str] | None = None  # of the moment in which the warm-up was over
        self._own_counts: dict[str, float] = {}

    def run(self) -> None:
        """Until the time is over, or the pool is broken. Ctrl-C leaves it at once."""
        trim_heap()
        try:
            self._load.run()
            self._own_counts = _own_counts(self._batcher)
        except IntegrityError as error:
            self._broken = str(error)

    def facts(self) -> Facts:
        """Ends all that is still there, and looks at what is left."""
        counts, watch = self._load.counts, self._watch
        in_flight = self._load.in_flight
        leaked = self._end()
        last = watch.sample()
        facts = Facts(
            seconds=last.seconds, planned=self._plan.seconds, received=counts.received, finished=counts.finished,
            aborted=counts.aborted, rejected=counts.rejected, failed=counts.failed, in_flight=in_flight,
            own_counts=self._own_counts, kinds=counts.kinds, tokens=watch.tokens, steps=watch.steps,
            preemptions=watch.preemptions, recomputed=counts.recomputed, peak=watch.peak,
            full_share=watch.full_seconds / watch.step_seconds if watch.step_seconds else 0.0,
            num_blocks=self.pool.num_blocks, samples=watch.samples, first_token=watch.first_token,
            per_token=watch.per_token, checked=self.checker.checked, close=self.checker.close,
            differences=[str(each) for each in self.checker.differences], errors=self._load.errors,
            broken=self._broken, leaked=leaked,
            grown=[],
            other_rounds=self._others.rounds, other_out_of_blocks=self._others.out_of_blocks,
            stuck=self._load.stuck,
        )  # fmt: skip
        return replace(facts, grown=self._grown()) if facts.resident and grows(facts.resident) else facts

    def _grown(self) -> list[tuple[str, int]]:
        """Types of objects of which there are more than after the warm-up."""
        more = heap() - (self._heap or Counter()) if self._heap else Counter[str]()
        return [(name, count) for name, count in more.most_common(5) if count >= LEAST_GROWN]

    def _tell_and_count(self, load: Load) -> None:
        if self._heap is None and load.watch.seconds >= HEAP_AT * self._plan.seconds:
            self._heap = heap()
        self._tell(load)

    def _end(self) -> list[LeakedBlock]:
        """Give all back; the blocks that did not come."""
        self._others.drop()
        if self._broken is None:
            try:
                self._batcher.close()
                gc.collect()
                self.pool.check_integrity()
            except IntegrityError as error:
                self._broken = str(error)
        return [] if self._broken else leaked_blocks(self.pool)


def leaked_blocks(pool: KVPool) -> list[LeakedBlock]:
    """All that is held, where nothing should be."""
    with pool.changing():
        blocks: BlockPool = pool.blocks
        held = [block for block, count in enumerate(blocks.refcounts) if count]
        debug = pool.debug
        if debug is None:
            return [LeakedBlock(block) for block in held]
        return [
            LeakedBlock(block, tuple(map(str, debug.holders(block))), tuple(map(str, debug.history(block))))
            for block in held
        ]


def _own_counts(batcher: ContinuousBatcher) -> dict[str, float]:
    """What the metrics of the batcher would say."""
    sums, _ = batcher.tally.read()
    counters = Counter(sums.numbers)
    return {
        "received": counters[keys.RECEIVED],
        "finished": sum(count for key, count in counters.items() if key[0] == keys.FINISHED),
        "aborted": counters[keys.ABORTED],
        "rejected": sum(count for key, count in counters.items() if key[0] == keys.REJECTED),
    }
