"""The rows of a batch: their sequences, their padding, and the step that is under way. One owner for all layers."""

from __future__ import annotations

from collections.abc import Iterable

from hfpaged.block_manager import BlockManager
from hfpaged.content import Bools
from hfpaged.errors import CacheMismatchError, StreamingError
from hfpaged.kv_pool import KVPool
from hfpaged.padding import ends_in_padding, extended, tokens_among
from hfpaged.row_tokens import RowTokens
from hfpaged.sequence import Sequence
from hfpaged.step import Step, StepPlan, build_step
from hfpaged.step_copies import StepCopies
from hfpaged.step_residuals import StepResiduals
from hfpaged.stream_rule import StreamRule


class Rows:
    """`length` positions in `batch` rows, padding included; sequences store only what is no padding.

    A step runs layer by layer: the first layer that brings new keys begins it, the others join.
    """

    is_packed = False  # whether one row of the model is several sequences, side by side

    def __init__(self, pool: KVPool, publishes: bool = True) -> None:
        self.pool = pool
        self.tokens = RowTokens(pool, publishes)
        self.sequences: list[Sequence] = []
        self.rules: tuple[StreamRule | None, ...] | None = None  # by layer group, of a cache that forgets
        self.length = self.past_length = 0
        self.kept: Bools | None = None  # [batch, length], False for padding; None: there is none
        self.plan: StepPlan | None = None
        self.steps: list[Step] = []  # by layer group; empty between a change of rows and the next step
        self.copies = StepCopies(pool)
        self.residuals = StepResiduals(pool.residuals)
        self.records_past = False  # blocks that left a window stay until the next crop
        self.in_forward = False  # whether a forward has begun that has not ended; known of patched models only
        self._has_just_begun = False  # whether that forward is the one in which the rows began with known tokens
        self.late_padding = False  # whether the step has padding behind a token of its row
        self.seen: dict[int, int] = {}  # positions by layer, for layers that have seen any
        self.graphs: set[int] = set()  # layers with stored keys that needed gradients
        with pool.changing():  # other threads go through them there
            pool.live_rows.add(self)

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def length_of(self, layer: int) -> int:
        """Positions that `layer` has seen."""
        return self.seen.get(layer, 0)

    def join(self, layer: int, batch: int, query_length: int) -> None:
        """Layer `layer` brings keys for `query_length` positions: begin a step, or take part in the one under way.

        Raises CacheMismatchError, or OutOfBlocksError with all blocks of these rows given back.
        """
        past = self.length_of(layer)
        if past == self.length or not self.steps:
            self._begin(batch, query_length)
        if past != self.past_length or past + query_length != self.length or batch != self.batch:
            raise CacheMismatchError(
                f"layer {layer} has seen {past} positions and brings {query_length} for {batch} rows, while the step "
                f"goes from {self.past_length} to {self.length} for {self.batch} rows; start with a fresh cache"
            )
        self.seen[layer] = self.length

    def streams(self, group: int) -> bool:
        """Whether layers of this group forget what is neither sink nor window."""
        return self.rules is not None and self.rules[group] is not None

    def check_whole(self, group: int, reason: str = "read as a tensor") -> None:
        """Raises StreamingError where rows have forgotten something: no dense view can show what is left."""
        if self.streams(group) and any(sequence.tables[group].first for sequence in self.sequences):
            raise StreamingError(
                f"a cache with window= has forgotten a part of its {self.length} positions, so only the paged kernels "
                f"can go on, and a dense view of all of them is needed here ({reason}); use a PagedCache without "
                "window= for that"
            )

    def begin_with(self, sequences: list[Sequence], length: int, kept: Bools | None) -> None:
        """Let these rows, which are empty, hold the first `length` positions: `sequences` store the `kept` ones."""
        self._has_just_begun = True
        self.sequences, self.length, self.kept, self.steps = sequences, length, kept, []
        self.seen = {layer: length for group in self.pool.groups for layer in group.layers}

    def expect(self, plan: StepPlan | None) -> None:
        """A forward begins: the step before it is over, and can no longer be rolled back."""
        self._has_just_begun = self._has_just_begun and self.in_forward
        self._settle_if_due(self.residuals.are_due)  # of a forward that nobody announced: an unpatched model's
        self.plan, self.steps, self.in_forward = plan, [], True

    def rollback(self) -> None:
        """Undo the step under way, after an exception in the middle of a forward."""
        self.tokens.step_undone()
        with self.pool.changing():
            self.residuals.undo()
        if self._has_just_begun:  # the known tokens go as well: who uses the cache next may bring another prompt
            self.free()
        if not self.steps:
            return
        self.seen = {layer: min(seen, self.past_length) for layer, seen in self.seen.items()}
        self._cut(self.past_length)

    def see_later_tokens(self) -> None:
        """What a layer stores is no function of the tokens before it alone: others must not find it."""
        self.tokens.forget(self.sequences)

    def complete(self) -> None:
        """The forward is over: what it filled is published, what left a window goes back."""
        self.tokens.step_completed()
        self._settle_if_due(self.tokens.is_due or self.residuals.are_due)
        self.release_left()

    def release_left(self, *, recorded: bool = False) -> None:
        """Give back what left the windows, `recorded` or not. The step before can no longer be rolled back then."""
        if self.pool.manager.has_windows and (recorded or not self.records_past):
            self.steps = []
            with self.pool.changing() as manager:
                manager.release_left(self.sequences)

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions of each row. Raises WindowPassedError and changes nothing where layers
        with a window do not hold any more what the next token would see.
        """
        length = min(length, self.length)
        for sequence, stored in zip(self.sequences, tokens_among(self.kept, self.batch, length), strict=True):
            self.pool.manager.check_trim(sequence, stored)
        self._settle_if_due()
        self.seen = {layer: min(seen, length) for layer, seen in self.seen.items()}
        self._cut(length)

    def select(self, indices: Iterable[int]) -> None:
        """Row i becomes what row indices[i] was; rows may repeat or vanish. Tables are forked, nothing is copied."""
        indices = list(indices)
        with self.pool.changing() as manager:
            self._publish(manager)
            old = self.sequences
            chosen = [old[index] for index in indices]
            self.sequences = [manager.fork(sequence) for sequence in chosen]
            for sequence in old:
                manager.free(sequence)
        self.kept = None if self.kept is None else self.kept[indices]
        self.steps = []

    def fork(self) -> Rows:
        """Other rows over the same blocks."""
        child = Rows(self.pool)
        with self.pool.changing() as manager:
            self._publish(manager)
            child.tokens = self.tokens.fork()
            child.sequences = [manager.fork(sequence) for sequence in self.sequences]
        child.length, child.kept, child.seen = self.length, self.kept, dict(self.seen)
        child.graphs, child.records_past, child.rules = set(self.graphs), self.records_past, self.rules
        return child

    def abandon(self) -> None:
        """The cache of these rows is gone."""
        self.pool.abandon(self._give_back)

    def free(self) -> None:
        """Give all blocks back; the rows are empty and usable afterwards."""
        with self.pool.changing() as manager:
            self._give_back(manager)
        self.length, self.kept, self.plan, self.steps, self.seen = 0, None, None, [], {}
        self.graphs, self._has_just_begun = set(), False

    def _give_back(self, manager: BlockManager) -> None:
        try:
            self._publish(manager)
        finally:
            for sequence in self.sequences:
                manager.free(sequence)
            self.copies.free(manager)
            self.sequences = []

    def settle_idle(self, manager: BlockManager) -> None:
        """Between two forwards: let others find all of it now. Another thread may be about to begin the next one."""
        if not self.in_forward:
            self.tokens.settle(manager, self.sequences, merge=False)

    def _settle_if_due(self, is_due: bool = True) -> None:
        if is_due:
            with self.pool.changing() as manager:
                self._publish(manager)

    def _publish(self, manager: BlockManager) -> None:
        """All steps are over: what they filled lies in its blocks, and others can find it."""
        self.residuals.settle()
        self.tokens.settle(manager, self.sequences)

    def _begin(self, batch: int, query_length: int) -> None:
        self.copies.let_go()
        plan, self.plan = self.plan, None
        if not self.length:
            self.free()  # rows without a token bind nobody to their number
        kept = plan.kept if plan and plan.kept is not None and plan.kept.shape == (batch, query_length) else None
        if self.sequences and batch != self.batch:
            raise CacheMismatchError(
                f"the cache holds {self.batch} rows and the model brings {batch}; use reorder_cache, "
                "batch_select_indices or batch_repeat_interleave to change rows, or a fresh cache"
            )
        same_as = plan.same_as if plan and not self.sequences and len(plan.same_as) == batch else list(range(batch))
        self.past_length = self.length  # what a rollback goes back to, from the moment in which there is a step
        try:
            self._grow(same_as, query_length, kept)
        except BaseException:  # Ctrl-C too: tables may have grown by then, and copies may be lost
            self.free()
            raise
        self.tokens.step_begins(self.sequences, self.length + query_length, query_length, kept)
        self._remember(batch, query_length, kept)

    def _grow(self, same_as: list[int], query_length: int, kept: Bools | None) -> None:
        """Rows that store their tokens grow; a row that equals an earlier one becomes its fork."""
        counts = [query_length] * len(same_as) if kept is None else kept.sum(axis=1).tolist()
        owns = [row == first for row, first in enumerate(same_as)]
        with self.pool.changing() as manager:
            if not self.records_past:  # what the step needs is seen from its first token, which a rollback goes back to
                manager.release_left(self.sequences)
            if not self.sequences:
                self.sequences = [manager.create(self.rules) for own in owns if own]
            own_counts = [count for count, own in zip(counts, owns, strict=True) if own]
            self.residuals.settle()
            copies = manager.grow(list(zip(self.sequences, own_counts, strict=True)))
            self.copies.begin(manager, self.residuals.copies(copies))
            if not all(owns):
                stored = dict(zip((row for row, own in enumerate(owns) if own), self.sequences, strict=True))
                self.sequences = [stored[i] if own else manager.fork(stored[same_as[i]]) for i, own in enumerate(owns)]
            self.steps = [self._step(group, query_length, kept, owns) for group in range(len(self.pool.groups))]

    def _step(self, group: int, query_length: int, kept: Bools | None, owns: list[bool]) -> Step:
        tables = [sequence.tables[group] for sequence in self.sequences]
        step = build_step(tables, self.pool.block_size, query_length, kept, owns)
        return self.residuals.with_filling(step, tables, kept, owns)

    def _remember(self, batch: int, query_length: int, kept: Bools | None) -> None:
        self.length += query_length
        self.kept = extended(self.kept, (batch, self.past_length), kept, (batch, query_length))
        self.late_padding = kept is not None and ends_in_padding(self.kept, kept)

    def _cut(self, length: int) -> None:
        with self.pool.changing() as manager:
            for sequence, stored in zip(self.sequences, tokens_among(self.kept, self.batch, length), strict=True):
                manager.trim(sequence, stored)
        self.length = length
        self.kept = None if self.kept is None else self.kept[:, :length]
        self.steps = []
