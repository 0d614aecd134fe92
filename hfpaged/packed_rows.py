"""The sequences of one packed step, in the place of a batch's rows: [1, tokens] for the model, many for attention."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager

from hfpaged.block_manager import BlockManager
from hfpaged.errors import CacheMismatchError, PackedForwardError
from hfpaged.kv_pool import KVPool
from hfpaged.packed_plan import PackedInput, PackedPlan, group_plan
from hfpaged.packed_step import build_packed_step, with_parts
from hfpaged.rows import Rows
from hfpaged.sequence import Sequence
from hfpaged.step import Step
from hfpaged.step_copies import StepCopies


class PackedRows(Rows):
    """One row for the model. Its sequences belong to whoever begins the step, and stay when it is over."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool, publishes=False)
        self._num_tokens = 0
        self._is_static = False

    @property
    def is_packed(self) -> bool:  # type: ignore[override]
        """Whether the one row is more than one sequence, so that no dense view can be made of it; or may be."""
        return len(self.sequences) > 1 or self._is_static

    def begin_packed(self, manager: BlockManager, growth: Many[tuple[Sequence, int]]) -> None:
        """Let each sequence grow by its number of tokens, those with one first; the forward stores just these.

        Raises OutOfBlocksError and changes nothing.
        """
        self.residuals.settle()
        copies = manager.grow(growth)
        self.copies.begin(manager, self.residuals.copies(copies))
        self.sequences = [sequence for sequence, _ in growth]
        counts = [count for _, count in growth]
        self._tell_of(sum(counts), max(sequence.length for sequence in self.sequences))
        self.steps = [self._packed_step(group, counts) for group in range(len(self.pool.groups))]

    def _tell_of(self, num_tokens: int, longest: int) -> None:
        """The model hears of as many positions as the longest sequence has: what depends on them must not be missed."""
        self._num_tokens = num_tokens
        self.length = longest if not self.is_packed else max(longest, num_tokens)
        self.past_length = self.length - num_tokens
        self.seen = {}

    def plan_of_step(self, given: PackedInput) -> PackedPlan:
        """The step under way, for processes that hold other heads."""
        groups = [
            group_plan([sequence.tables[group] for sequence in self.sequences], self.copies.of(group), step)
            for group, step in enumerate(self.steps)
        ]
        blocks, residuals = self.pool.blocks.high_water, self.pool.residuals
        return PackedPlan(given, tuple(groups), self.length, blocks, residuals.high_water if residuals else 0)

    def follow(self, plan: PackedPlan) -> None:
        """Take part in a step of the process that leads. Its pool decides; of ours the memory is used, and no more."""
        self.pool.blocks.reserve(plan.num_blocks)
        if self.pool.residuals is not None:
            self.pool.residuals.reserve(plan.num_residuals)
        self.copies.follow([group.copies_on_write for group in plan.groups])
        tables = [group.tables(self.pool.blocks, self.pool.block_size) for group in plan.groups]
        self.sequences = [Sequence(of_one) for of_one in zip(*tables, strict=True)]
        self._tell_of(len(plan.given.token_ids), plan.length)
        counts = plan.given.counts.tolist()
        self.steps = [
            with_parts(group.with_filling(build_packed_step(held, counts, self.pool.block_size), self.pool.block_size))
            for group, held in zip(plan.groups, tables, strict=True)
        ]

    def end_followed(self) -> None:
        """The step that was followed is over, however it went; all copies must be made by then."""
        self.steps, self.sequences = [], []
        self.copies.follow([])

    @contextmanager
    def static(self, steps: list[Step], length: int) -> Iterator[None]:
        """One forward reads and writes by `steps`, one for each layer group, whatever step is under way.

        It sees nothing of this one, so that it can be recorded: no sequences, no copies to be made, and `length` for
        the longest sequence, which none that the record is used for may exceed.
        """
        told = (self.steps, self.sequences, self.length, self.past_length, self.seen, self._num_tokens, self.copies)
        self.steps, self.sequences, self.seen, self._is_static = steps, [], {}, True
        self._num_tokens, self.copies = steps[0].num_seqs, StepCopies(self.pool)
        self.length, self.past_length = length, length - self._num_tokens
        try:
            yield
        finally:
            self.steps, self.sequences, self.length, self.past_length, self.seen, self._num_tokens, self.copies = told
            self._is_static = False

    def join(self, layer: int, batch: int, query_length: int) -> None:
        """Layer `layer` brings keys for the tokens of the step. Raises CacheMismatchError for others."""
        if not self.steps or batch != 1 or query_length != self._num_tokens or layer in self.seen:
            raise CacheMismatchError(
                f"layer {layer} brings {query_length} positions in {batch} rows, while the packed step has "
                f"{self._num_tokens if self.steps else 0} in one, once for each layer"
            )
        self.seen[layer] = self.length

    def length_of(self, layer: int) -> int:
        """Positions that `layer` has seen, in the words of one row."""
        return self.seen.get(layer, self.past_length)

    def check_whole(self, group: int, reason: str = "read as a tensor") -> None:
        """Raises PackedForwardError where there is no dense view of what attention sees."""
        if self.is_packed:
            raise PackedForwardError(reason, len(self.sequences))

    def end_packed(self) -> None:
        """All layers have stored the step. What left windows is still there: the step may have been too long."""
        self.steps = []
        with self.pool.changing() as manager:
            self.residuals.settle()
            self.copies.free(manager)
        self.sequences = []

    def undo_packed(self, lengths: Many[int]) -> None:
        """The forward failed: each sequence goes back to `lengths[i]` tokens, or to none where it has a state, which
        the model may have changed. All copies must be made by then.
        """
        self.steps = []
        with self.pool.changing() as manager:
            self.residuals.undo()
            for sequence, length in zip(self.sequences, lengths, strict=True):
                manager.trim(sequence, 0 if sequence.state else length)
            self.copies.free(manager)
        self.sequences = []

    def _packed_step(self, group: int, counts: Many[int]) -> Step:
        tables = [sequence.tables[group] for sequence in self.sequences]
        step = build_packed_step(tables, counts, self.pool.block_size)
        return with_parts(self.residuals.with_packed_filling(step, tables))
