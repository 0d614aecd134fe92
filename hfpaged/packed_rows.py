"""The sequences of one packed step, in the place of a batch's rows: [1, tokens] for the model, many for attention."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager

from hfpaged.block_manager import BlockManager
from hfpaged.errors import CacheMismatchError, PackedForwardError
from hfpaged.kv_pool import KVPool
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
        self._num_tokens = sum(counts)
        longest = max(sequence.length for sequence in self.sequences)
        # The model is told of as many positions as the longest sequence has: what depends on them must not be missed.
        self.length = longest if not self.is_packed else max(longest, self._num_tokens)
        self.past_length = self.length - self._num_tokens
        self.seen = {}
        self.steps = [self._packed_step(group, counts) for group in range(len(self.pool.groups))]

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
