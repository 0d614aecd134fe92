"""What a replay counts while it runs."""

from __future__ import annotations

from array import array

from hfpaged.engine.request import Request, SequenceGroup
from hfpaged.engine.schedule import Admission
from hfpaged.engine.waits import plus
from hfpaged.planner.sketch import Sketch

_SUMS = (
    "arrived", "refused", "too_long", "finished", "queried", "hits", "preemptions", "lost", "found_again", "steps",
    "decodes", "prefills", "sequences", "busy_seconds", "block_seconds", "used_slots", "empty_slots", "output_tokens",
)  # fmt: skip

# Steps between two looks at what blocks leave empty: no multiple of a block size, at which all may be full.
LOOK_EVERY = 13


class ReplayStats:
    """Requests, tokens, steps and seconds; `gaps` are those between two tokens of a sequence."""

    def __init__(self, block_size: int, num_groups: int) -> None:
        self._block_size, self._num_groups = block_size, num_groups
        self.arrived = self.refused = self.too_long = self.finished = 0
        self.queried = self.hits = self.preemptions = self.lost = self.found_again = 0
        self.steps = self.decodes = self.prefills = self.sequences = 0
        self.busy_seconds = self.block_seconds = self.used_slots = self.empty_slots = 0.0
        self.ttft, self.queue, self.duration = array("d"), array("d"), array("d")
        self.gaps = Sketch()
        self.waits: dict[str, float] = {}
        self.output_tokens = 0
        self.most_blocks = 0

    def plus(self, other: ReplayStats) -> ReplayStats:
        """Those of two replicas together; `most_blocks` is the larger one."""
        both = ReplayStats(self._block_size, self._num_groups)
        for name in _SUMS:
            setattr(both, name, getattr(self, name) + getattr(other, name))
        both.ttft, both.queue = self.ttft + other.ttft, self.queue + other.queue
        both.duration, both.waits = self.duration + other.duration, plus(self.waits, other.waits)
        both.gaps.merge(self.gaps)
        both.gaps.merge(other.gaps)
        both.most_blocks = max(self.most_blocks, other.most_blocks)
        return both

    def admitted(self, admission: Admission, now: float) -> None:
        """A group begins, or begins again."""
        request = admission.group.request
        if request.admitted_time is not None:
            self.found_again += admission.found
            return
        request.admitted_time, request.num_cached_tokens = now, admission.found
        self.queue.append(now - request.arrival_time)
        if request.root is not None:
            self.queried += request.num_prompt_tokens
            self.hits += admission.found

    def preempted(self, group: SequenceGroup, lost: int, now: float) -> None:
        """A group lost `lost` stored tokens; its last token came with the step before."""
        self.preemptions += 1
        self.lost += lost
        if len(group.sequences[0].tokens) > group.request.num_prompt_tokens and group.request.last_token_time is None:
            group.request.last_token_time = now

    def stepped(self, sequences: int, prefill: int, decodes: int, seconds: float, used: int) -> None:
        """One step of so many sequences, after which `used` blocks are held."""
        self.steps += 1
        self.prefills += prefill
        self.decodes += decodes
        self.sequences += sequences
        self.busy_seconds += seconds
        self.block_seconds += used * seconds
        self.most_blocks = max(self.most_blocks, used)

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens."""
        return self.hits / max(self.queried, 1)

    @property
    def mean_blocks(self) -> float:
        """Held on average, while steps ran."""
        return self.block_seconds / (self.busy_seconds or 1e-9)

    @property
    def is_due(self) -> bool:
        """Whether it is time to `look`."""
        return self.steps % LOOK_EVERY == 0

    def look(self, lengths: list[int], seconds: float, used: int) -> None:
        """What the last blocks of sequences of these lengths leave empty."""
        size = self._block_size
        self.used_slots += used * size * seconds
        self.empty_slots += sum(-length % size for length in lengths) * self._num_groups * seconds

    def gap(self, seconds: float, count: int) -> None:
        """`count` sequences got their next token after so long."""
        if count:
            self.gaps.add(seconds, count)

    def first_token(self, request: Request, now: float) -> None:
        request.first_token_time = now
        self.ttft.append(now - request.arrival_time)

    def next_token(self, request: Request, now: float) -> None:
        """After a preemption."""
        if request.last_token_time is not None:
            self.gap(now - request.last_token_time, 1)
            request.last_token_time = None

    def ended(self, request: Request, now: float) -> None:
        self.finished += 1
        self.duration.append(now - request.arrival_time)
        self.output_tokens += request.num_new
        self.waits = plus(self.waits, request.waits)
