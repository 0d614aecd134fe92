"""A request and its sequences, as the engine works on them. Plain state: who may change what stands in the scheduler
(queues, blocks) and in the batcher (tokens, ends).
"""

from __future__ import annotations

import contextvars
from array import array
from typing import TYPE_CHECKING

from hfpaged.block_pool import BlockPool
from hfpaged.clock import now
from hfpaged.engine.outputs import FinishReason, PositionLogprobs, RequestMetrics
from hfpaged.engine.waits import Waiting
from hfpaged.memory_account import MemoryAccount
from hfpaged.prefix_block import Origin, Root
from hfpaged.sequence import Sequence

if TYPE_CHECKING:
    from hfpaged.engine.beam_search import BeamSearch
    from hfpaged.engine.detokenizer import Detokenizer
    from hfpaged.engine.params import RequestParams
    from hfpaged.engine.prompt_lookup import PromptLookup
    from hfpaged.engine.sampler import SequenceSampler
    from hfpaged.engine.shadow_capture import Capture
    from hfpaged.engine.stopping import StopConditions


class SequenceState:
    """One sequence: its token ids, and while it runs its block tables.

    tokens    the prompt's and the new ones; the last one is not stored yet while it waits for its forward
    blocks    its tables; None while it holds no block
    draft     tokens that the coming step verifies
    capture   keeps some of the logits that its tokens are chosen by, of requests that are shadowed
    """

    __slots__ = (
        "blocks", "capture", "cumulative_logprob", "detokenizer", "draft", "finish_reason", "index", "logprobs",
        "lookup", "request", "sampler", "stop_reason", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, tokens: array[int]) -> None:
        self.request, self.index, self.tokens = request, index, tokens
        self.blocks: Sequence | None = None
        self.draft: list[int] = []
        self.capture: Capture | None = None
        self.sampler: SequenceSampler | None = None
        self.lookup: PromptLookup | None = None
        self.detokenizer: Detokenizer | None = None
        self.logprobs: list[PositionLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are stored."""
        return self.blocks.length if self.blocks is not None else 0

    @property
    def num_left(self) -> int:
        """Tokens that are to be computed before the next one can be sampled."""
        blocks = self.blocks
        return len(self.tokens) - (0 if blocks is None else blocks.tables[0].length)

    @property
    def num_new(self) -> int:
        """Tokens behind the prompt."""
        return len(self.tokens) - self.request.num_prompt_tokens

    def fork(self, index: int) -> SequenceState:
        """The same tokens; it holds no blocks, and nothing is known yet of how it goes on."""
        return SequenceState(self.request, index, self.tokens[:])


class SequenceGroup:
    """Sequences that run and are preempted together: one, or all beams of a beam search.

    seats     sequences that it is, or will be when its prompt is computed
    work      tokens computed for it so far, again after each preemption: what a preemption would throw away
    """

    __slots__ = ("beams", "request", "seats", "sequences", "waited_for", "waiting", "was_preempted", "work")

    def __init__(self, request: Request, sequences: list[SequenceState], seats: int = 1) -> None:
        self.request, self.sequences, self.seats = request, sequences, seats
        self.beams: BeamSearch | None = None
        self.work = 0
        self.was_preempted = False
        self.waited_for: str | None = None  # the request that computed its prefix meanwhile
        self.waiting = Waiting(request.arrival_time)

    @property
    def is_decoding(self) -> bool:
        """Whether the next step of each of its sequences samples."""
        if len(self.sequences) == 1:  # looked at for each sequence at each step
            return self.sequences[0].num_left == 1
        return all(seq.num_left == 1 for seq in self.sequences)

    @property
    def num_computed(self) -> int:
        return sum(seq.num_computed for seq in self.sequences)


class Request:
    """What a client asked for. `number` is its place in the order of arrival."""

    def __init__(
        self, request_id: str, number: int, prompt: array[int], params: RequestParams, *, text: str | None = None,
        priority: int = 0, tenant: str = "", salt: str | None = None, adapter: str | None = None,
    ) -> None:  # fmt: skip
        self.request_id, self.number, self.prompt, self.params = request_id, number, prompt, params
        self.text, self.priority, self.tenant, self.salt = text, priority, tenant, salt
        self.adapter = adapter
        self.num_prompt_tokens = len(prompt)
        self.prompt_token_ids: list[int] = prompt.tolist()
        self.sequences: list[SequenceState] = []  # in the order of their index; of beams the results
        self.groups: list[SequenceGroup] = []  # those that have not ended
        self.stop: StopConditions | None = None
        self.root: Root | None = None  # what its tokens are found under; None: they are not shared
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None  # by position, of the first never any
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt)
        self.error: BaseException | None = None
        self.is_finished = self.is_awaited_at_end = False
        self.num_cached_tokens = 0
        self.arrival_time = now()
        self.admitted_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finished_time: float | None = None
        self.preemptions = self.computed_tokens = self.draft_tokens = self.accepted_tokens = 0
        self.origin = Origin(request_id)
        self.context = contextvars.copy_context()
        self.memory = MemoryAccount()
        self.block_bytes = 0
        self.waits: dict[str, float] = {}

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether logprobs of its prompt are missing."""
        return self.prompt_logprobs is not None and None in self.prompt_logprobs[1:]

    @property
    def metrics(self) -> RequestMetrics:
        """As they stand now."""
        memory, size = self.memory, self.block_bytes
        return RequestMetrics(
            self.arrival_time, self.admitted_time, self.first_token_time, self.finished_time, self.preemptions,
            memory.peak_blocks, self.computed_tokens, self.draft_tokens, self.accepted_tokens, self.num_cached_tokens,
            memory.peak_blocks * size, memory.shared_blocks * size, memory.block_seconds * size, self.waits,
            self.num_new,
        )  # fmt: skip

    @property
    def num_new(self) -> int:
        """Tokens behind the prompt, in all sequences."""
        return sum(seq.num_new for seq in self.sequences)

    def look_at_memory(self, pool: BlockPool) -> None:
        """Its blocks have changed, or are about to."""
        self.memory.look(pool, [seq.blocks for group in self.groups for seq in group.sequences if seq.blocks])
