"""Which tokens the rows of a cache hold, learnt from the inputs of its forwards, so that others find their blocks."""

from __future__ import annotations

from collections.abc import Sequence as Many

from hfpaged.block_manager import BlockManager
from hfpaged.content import Bools, Content, has_plain_positions, row_items
from hfpaged.device_timer import Timed
from hfpaged.kv_pool import KVPool
from hfpaged.prefix_block import Origin, Root
from hfpaged.restore_costs import FEWEST_TOKENS
from hfpaged.sequence import Sequence
from hfpaged.token_chain import TokenChain


class RowTokens:
    """The inputs of the forwards since the chains of the rows were last brought up to date.

    Reading tokens makes a GPU wait, so the chains are brought up to date once per block, not once per step.
    """

    def __init__(self, pool: KVPool, publishes: bool = True) -> None:
        self.pool = pool
        self.publishes = publishes
        self.root: Root | None = None  # what the tokens are found under; None: they are not known
        self.origin: Origin | None = None  # who computes them
        self._coming: Content | None = None
        self._unread: list[tuple[Content, Bools | None]] = []
        self._is_open = False  # whether the last of them belongs to a step that can still be undone
        self._timed: Timed | None = None  # the step under way, where somebody wants to know what prompts take

    def announce(self, content: Content | None) -> None:
        """A forward with these inputs begins; None for inputs that nobody understands."""
        self._coming = content

    def step_begins(self, sequences: Many[Sequence], length: int, count: int, kept: Bools | None) -> None:
        """The announced forward stores `count` positions of each row, those that are `kept`; `length` with them."""
        coming, self._coming = self._coming, None
        self._time(len(sequences) * count if count > 1 else 0)
        if self.root is None:
            return
        if coming is None or coming.shape != (len(sequences), count) or not set(coming.keys) <= set(self.root.keys):
            self.forget(sequences)
            return
        if coming.positions is None and any(sequence.length != length for sequence in sequences):
            self.forget(sequences)  # a model that counts padding in
            return
        if length == count:
            for sequence in sequences:
                sequence.chain = TokenChain(self.root)
        self._unread.append((coming.kept(), kept))
        self._is_open = True

    def step_undone(self) -> None:
        """The forward is over before its end, or before it began."""
        self._coming = self._timed = None
        if self._is_open:
            self._unread.pop()
            self._is_open = False

    def step_completed(self) -> None:
        self._is_open = False
        if self._timed is not None and self.pool.swapping is not None:
            self.pool.swapping.timer.end(self._timed)
        self._timed = None

    @property
    def is_due(self) -> bool:
        """Whether some row may have filled a block since the last time."""
        return self.is_due_after(0)

    def is_due_after(self, count: int) -> bool:
        """Whether some row may have filled a block when `count` more positions are stored."""
        return sum(content.shape[1] for content, _ in self._unread) + count >= self.pool.block_size

    def settle(self, manager: BlockManager, sequences: Many[Sequence], merge: bool = True) -> None:
        """Bring the chains up to date, and publish what is full; without `merge` no table changes."""
        if self._is_open:  # broken off in the middle of a step: no layer's keys can be relied on
            self.forget(sequences)
        unread, self._unread = self._unread, []
        for content, kept in unread:
            self._read(content, kept, sequences)
        if unread and self.publishes:
            for sequence in sequences:
                self.pool.prefixes.publish(sequence, merge, self.origin)

    def forget(self, sequences: Many[Sequence]) -> None:
        """The tokens are not known any more: nothing behind what is published by now can be found."""
        self.root, self._unread, self._is_open = None, [], False
        for sequence in sequences:
            sequence.chain = None

    def _time(self, tokens: int) -> None:
        swapping = self.pool.swapping
        self._timed = None
        if swapping is not None and tokens >= FEWEST_TOKENS:
            self._timed = swapping.timer.begin(tokens, next(iter(self.pool.storage.devices), None))

    def fork(self) -> RowTokens:
        """For other rows with the same tokens; all must be read."""
        child = RowTokens(self.pool, self.publishes)
        child.root, child.origin = self.root, self.origin
        return child

    def _read(self, content: Content, kept: Bools | None, sequences: Many[Sequence]) -> None:
        if self.root is None:
            return
        chains = [sequence.chain for sequence in sequences]
        pasts = [chain.length if chain else 0 for chain in chains]
        if self.root.width < content.width or (self.root.width == 1 and not has_plain_positions(content, kept, pasts)):
            self.forget(sequences)
            return
        for row, (chain, past) in enumerate(zip(chains, pasts, strict=True)):
            if chain is not None:
                chain.items.extend(row_items(content, row, kept, past, self.root.width))
