"""Requests of a trace as the scheduler knows them, without all that only a model or an observer wants."""

from __future__ import annotations

from array import array

from hfpaged.block_pool import BlockPool
from hfpaged.engine.request import Request, SequenceGroup, SequenceState
from hfpaged.planner.trace import Trace, TraceRequest
from hfpaged.planner.trace_tokens import own_tokens, token_ids


class ReplayRequest(Request):
    """It ends when each of its sequences has its tokens: `total` with the prompt, the answer known beforehand. The
    engine that gets it says under which `root` its prefix is looked up.
    """

    def __init__(self, trace: Trace, asked: TraceRequest, number: int, arrival: float) -> None:
        self.request_id = str(number)
        self.number, self.arrival_time, self.root = number, arrival, None
        self.priority, self.tenant = asked.priority, str(asked.tenant)
        self.adapter = str(asked.adapter) if asked.adapter else None
        self.num_prompt_tokens = asked.prompt_tokens
        self.all_tokens = token_ids(trace, asked, number)
        self.total = len(self.all_tokens)
        self.prompt_logprobs = None
        self.origin = None  # type: ignore[assignment]  # of blocks that nobody is told of
        self.preemptions = self.computed_tokens = self.num_cached_tokens = 0
        self.admitted_time = self.first_token_time = self.last_token_time = None
        self.waits = {}
        first = SequenceState(self, 0, self.all_tokens[: asked.prompt_tokens])
        self.sequences = [first]
        self.groups = [SequenceGroup(self, [first], seats=asked.n)]

    def look_at_memory(self, pool: BlockPool) -> None:
        """Nobody asks what memory one request took."""

    def next_tokens(self, seq: SequenceState, count: int) -> array[int]:
        """The next `count` tokens of one of its sequences."""
        if seq.index:
            return own_tokens(self.number, seq.index, count)
        length = len(seq.tokens)
        return self.all_tokens[length : length + count]
