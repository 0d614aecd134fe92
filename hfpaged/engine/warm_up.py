"""The first forward of each kind compiles what the others use: here it is one that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.piece import Piece
from hfpaged.errors import OutOfBlocksError

# Tokens of prompts by forward; each prompt is followed by one token more. One alone, and some side by side.
KINDS = ((40,), (40, 5, 5, 5))


def forwards(runner: ModelRunner, limits: Mapping[str, int]) -> Iterator[Callable[[], None]]:
    """What is to be called between two steps, one after the other."""
    longest = min(limits["max_num_batched_tokens"], limits.get("max_model_len", KINDS[0][0] + 1))
    for lengths in KINDS:
        if len(lengths) <= limits["max_num_seqs"] and sum(lengths) <= longest:
            yield partial(_forward, runner, lengths)


def _forward(runner: ModelRunner, lengths: tuple[int, ...]) -> None:
    """Prompts of these lengths, and a token behind each. Their blocks go back."""
    pool = runner.cache.pool
    with pool.changing() as manager:
        sequences = [manager.create() for _ in lengths]
    try:
        runner.forward([Piece(seq, 0, [0] * count, 1) for seq, count in zip(sequences, lengths, strict=True)])
        runner.forward([Piece(seq, count, [0], 1) for seq, count in zip(sequences, lengths, strict=True)])
    except OutOfBlocksError:
        return
    finally:
        with pool.changing() as manager:
            for sequence in sequences:
                manager.free(sequence)
