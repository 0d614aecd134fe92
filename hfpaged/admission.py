"""Where prompts meet the prefix index: what is known of them is attached, and only the rest is computed.

A patched model tells the inputs of a forward before it runs. If they begin a batch, known prefixes become the first
blocks of its rows, parts that several rows have in common are computed once, and the forward gets the columns that are
left. It must be one of which the caller reads the last logits only, as generate() does.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hfpaged.agreed_matches import on_all_ranks
from hfpaged.block_manager import BlockManager
from hfpaged.common_runs import common_length
from hfpaged.content import Bools, Content, row_items
from hfpaged.errors import WindowPassedError
from hfpaged.explain import Decoder, explain_match, match_reason
from hfpaged.kv_pool import KVPool
from hfpaged.match_end import MatchEnd, match_end
from hfpaged.prefill_plan import plan_prefill
from hfpaged.prefix_block import Origin, Root, origins
from hfpaged.prefix_index import Match
from hfpaged.prefix_report import PrefixReport
from hfpaged.ranks import ranges
from hfpaged.rows import Rows
from hfpaged.sequence import Sequence
from hfpaged.token_chain import TokenChain

Inputs = Mapping[str, Any]


@dataclass
class Admission:
    """What was known of the prompts of a batch when it came. Kept for those who ask why."""

    root: Root
    items: list[array[int]]
    matches: list[Match]
    ends: list[MatchEnd]
    hits: list[int] = field(default_factory=list)  # known tokens of each row that were not computed again

    def explain(self, pool: KVPool, tokenizer: Decoder | None) -> list[PrefixReport]:
        """Why each row's match ended where it did; its blocks may be gone, or its own tokens known, by now."""
        index = pool.prefixes.index
        with pool.changing():
            hits = self.hits or [0] * len(self.items)  # none where the pool had no room for what was found
            rows = list(zip(self.items, self.ends, hits, strict=True))
            facts = [explain_match(index, self.root, items, end, hit) for items, end, hit in rows]
        return [row.with_texts(tokenizer) for row in facts]

    def found(self, pool: KVPool) -> Found:
        """What came of it, in short."""
        index = pool.prefixes.index
        entries = [entry for match in self.matches for entry in match.all_blocks]
        with pool.changing():
            reasons = [match_reason(index, self.root, *row) for row in zip(self.items, self.ends, strict=True)]
        return Found(
            sum(len(items) // self.root.width for items in self.items), sum(self.hits), tuple(dict.fromkeys(reasons)),
            origins(entries),
        )  # fmt: skip


class Found(NamedTuple):
    """Of `queried` prompt tokens of a batch `hit` need not be computed, as `computed_by` have; `reasons` why not more,
    each once.
    """

    queried: int = 0
    hit: int = 0
    reasons: tuple[str, ...] = ()
    computed_by: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Declined:
    """A batch of `shape` = (rows, positions) for which nothing was looked up, and why."""

    reason: str
    shape: tuple[int, int]
    mask: Tensor | None

    def explain(self, pool: KVPool, tokenizer: Decoder | None) -> list[PrefixReport]:
        rows, length = self.shape
        tokens = [length] * rows if self.mask is None else [int(count) for count in (self.mask != 0).sum(1)]
        return [PrefixReport(count, 0, 0, "declined", pool.block_size, declined=self.reason) for count in tokens]

    def found(self, pool: KVPool) -> Found:
        """Nothing."""
        return Found(reasons=("declined",))


def declined(reason: str, inputs: Inputs) -> Declined:
    """Nothing is looked up for these inputs of a forward."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    ids = inputs.get("inputs_embeds") if ids is None else ids
    shape = (int(ids.shape[0]), int(ids.shape[1])) if isinstance(ids, Tensor) and ids.ndim > 1 else (0, 0)
    return Declined(reason, shape, mask if isinstance(mask, Tensor) and tuple(mask.shape) == shape else None)


class Prompts:
    """The prompts of one batch, left-padded, and where their tokens come from; the caller reads `keep` columns."""

    def __init__(self, rows: Rows, root: Root, content: Content, kept: Bools | None, keep: int) -> None:
        self._rows, self._pool, self._root = rows, rows.pool, root
        self._width, self._kept, self._keep = content.shape[1], kept, keep
        self.items = [row_items(content, row, kept, 0, root.width) for row in range(content.shape[0])]
        self.lengths = [len(items) // root.width for items in self.items]
        limits = [max(length - keep, 0) for length in self.lengths]
        self._known: list[Sequence] = []  # holds what was found while the rest is computed
        self._pieces: list[tuple[int, Rows]] = []
        if self._pool.swapping is not None:
            self._pool.swapping.prepare(root, self.items, limits)
        try:
            self._look_up(root, limits)
        except BaseException:  # Ctrl-C, while files are read say
            self.close()
            raise

    @property
    def width(self) -> int:
        """Numbers of `items` for each token."""
        return self._root.width

    def compute_pieces(self, forward: Callable[[int, int], Rows], forward_cost: int) -> int:
        """Compute for single rows what pays; `forward(row, stop)` does it up to token `stop` of a row. Returns how
        many columns are left for all rows.
        """
        order = sorted(range(len(self.items)), key=lambda row: self.items[row].tobytes())
        common = [0] + [self._common(first, second) for first, second in itertools.pairwise(order)]
        known = [sequence.length for sequence in self._known]
        plan = plan_prefill(self.lengths, known, order, common, self._keep, forward_cost)
        self._pieces = [(row, forward(row, stop)) for row, stop in plan.pieces]
        if any(piece.tokens.root is None for _, piece in self._pieces):  # what came first depends on what comes later
            self._pieces, self._rows.tokens.root = [], None
            return self._width
        return plan.tail

    def attach(self, tail: int, exactly: bool = False) -> tuple[int, list[int]]:
        """Let the rows begin with all but the last `tail` columns. Where that is not to be had the tail is longer, or
        the whole prompt if it must be `exactly` that one. Returns (the columns that are attached, the tokens of each
        row in them).
        """
        with self._pool.changing() as manager:
            wanted = tail
            tail, cuts = self._settle_tail(manager, tail)
            if tail >= self._width or (exactly and tail != wanted):
                return 0, [0] * len(self.lengths)
            sequences = [self._take(manager, row, cut) for row, cut in enumerate(cuts)]
        length = self._width - tail
        self._rows.begin_with(sequences, length, None if self._kept is None else self._kept[:, :length])
        return length, cuts

    def close(self) -> None:
        """Let go of what was held for the time between."""
        with self._pool.changing() as manager:
            for sequence in self._known:
                manager.free(sequence)
        for _, rows in self._pieces:
            rows.free()

    def _look_up(self, root: Root, limits: list[int]) -> None:
        with self._pool.changing() as manager:
            prefixes = self._pool.prefixes
            own = [prefixes.longest(root, *part) for part in zip(self.items, limits, strict=True)]
            self.matches = on_all_ranks(self._pool, root, self.items, own)
            for items, match in zip(self.items, self.matches, strict=True):
                self._known.append(manager.create())
                prefixes.attach(self._known[-1], root, items, match)
            if prefixes.lower is not None:  # what is known of all rows is held by now
                self.matches = own = [self._fetch(manager, row, limit) for row, limit in enumerate(limits)]
            self.ends = [match_end(prefixes.index, root, *part) for part in zip(self.items, limits, own, strict=True)]

    def _fetch(self, manager: BlockManager, row: int, limit: int) -> Match:
        """Let what is known of a row, and held, be more by what comes back from below the pool."""
        prefixes, items = self._pool.prefixes, self.items[row]
        with prefixes.fetched(self._root, items, limit) as match:  # the rows before may have brought back some of it
            manager.trim(self._known[row], 0)
            prefixes.attach(self._known[row], self._root, items, match)
        return match

    def _settle_tail(self, manager: BlockManager, tail: int) -> tuple[int, list[int]]:
        while True:
            cuts = [max(length - tail, 0) for length in self.lengths]
            missing = max(cut - self._reach(manager, row, cut) for row, cut in enumerate(cuts))
            ((_, missing),) = ranges(self._pool.ranks, [missing])
            if not missing:
                return tail, cuts
            tail += missing

    def _reach(self, manager: BlockManager, row: int, cut: int) -> int:
        """How many of the first `cut` tokens of a row are to be had."""
        if cut == 0 or self._source(manager, row, cut) is not None:
            return cut
        return self._pool.prefixes.longest(self._root, self.items[row], cut).length(self._pool.block_size)

    def _source(self, manager: BlockManager, row: int, cut: int) -> Sequence | None:
        """A sequence that holds the first `cut` tokens of `row` and can be cut to them."""
        pieces = [piece.sequences[0] for first, piece in self._pieces if self._common(first, row) >= cut]
        fitting = [sequence for sequence in (self._known[row], *pieces) if sequence.length >= cut]
        return next((sequence for sequence in fitting if _can_trim(manager, sequence, cut)), None)

    def _take(self, manager: BlockManager, row: int, cut: int) -> Sequence:
        source = self._source(manager, row, cut) if cut else None
        if source is not None:
            sequence = manager.fork(source)
            manager.trim(sequence, cut)
            return sequence
        sequence = manager.create()
        sequence.chain = TokenChain(self._root)
        if cut:
            items = self.items[row]
            self._pool.prefixes.attach(sequence, self._root, items, self._pool.prefixes.longest(self._root, items, cut))
        return sequence

    def _common(self, first: int, second: int) -> int:
        return common_length(self.items[first], self.items[second]) // self._root.width


def _can_trim(manager: BlockManager, sequence: Sequence, length: int) -> bool:
    try:
        manager.check_trim(sequence, length)
    except WindowPassedError:
        return False
    return True


def cut_inputs(inputs: Inputs, content: Content, rows: slice, columns: slice) -> dict[str, Any]:
    """The inputs of a forward for some rows and columns only; the padding mask is left as it is."""
    return {
        name: given if name == "attention_mask" else _cut(name, given, content.shape, rows, columns)
        for name, given in inputs.items()
    }


def _cut(name: str, given: Any, shape: tuple[int, int], rows: slice, columns: slice) -> Any:
    if not isinstance(given, Tensor):
        return given
    if tuple(given.shape[:2]) == shape:
        return given[rows, columns]
    if name == "position_ids" and given.ndim == 2:  # [1, length] for all rows
        return given[:, columns]
    if name == "position_ids":  # [kinds, batch, length]
        return given[:, rows, columns]
    return given[columns] if name == "cache_position" else given
