"""What a step computes of one sequence, and what the model is given of all of them."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from hfpaged.engine.schedule import Scheduled
from hfpaged.packed_plan import PackedInput
from hfpaged.sequence import Sequence


class Piece:
    """Tokens of one sequence in a forward. `logits`: of how many of its last tokens they are wanted. `adapter`: the one
    that its request chose.
    """

    __slots__ = ("adapter", "blocks", "logits", "start", "token_ids")

    def __init__(
        self, blocks: Sequence, start: int, token_ids: Many[int], logits: int, adapter: str | None = None
    ) -> None:
        self.blocks, self.start, self.token_ids, self.logits = blocks, start, token_ids, logits
        self.adapter = adapter


def piece_of(work: Scheduled, logits: int) -> Piece:
    """What of a sequence a step computes, its draft at the end."""
    seq = work.seq
    assert seq.blocks is not None
    stop = work.start + work.count - len(seq.draft)
    ids = seq.tokens[work.start : stop]
    adapter = seq.request.adapter
    return Piece(seq.blocks, work.start, [*ids, *seq.draft] if seq.draft else ids, logits, adapter)


def packed_input(pieces: Many[Piece]) -> PackedInput:
    """All pieces side by side."""
    starts = np.array([piece.start for piece in pieces], dtype=np.int64)
    if all(len(piece.token_ids) == 1 for piece in pieces):  # a step that only decodes: no arrays of one number
        ids, counts = np.array([piece.token_ids[0] for piece in pieces], dtype=np.int64), np.ones_like(starts)
    else:
        ids = np.concatenate([np.asarray(piece.token_ids, dtype=np.int64) for piece in pieces])
        counts = np.array([len(piece.token_ids) for piece in pieces], dtype=np.int64)
    ends = np.cumsum(counts)
    if all(piece.logits == 1 for piece in pieces):
        return PackedInput(ids, starts, counts, ends - 1)
    wanted = [np.arange(end - piece.logits, end) for end, piece in zip(ends, pieces, strict=True)]
    return PackedInput(ids, starts, counts, np.concatenate(wanted))
