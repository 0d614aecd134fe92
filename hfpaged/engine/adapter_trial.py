"""Whether tokens of several adapters can lie side by side is tried with a few tokens: each sequence must get what it
gets alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from hfpaged.adapter_choice import AdapterChoices
from hfpaged.engine.adapter_mixing import MixedLayers, Row
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.piece import Piece
from hfpaged.engine.trial import are_close, prompts_of, sequences
from hfpaged.errors import MixedForwardError, OutOfBlocksError

# Tokens of each sequence: more than one, so that all of them are not those whose logits are wanted.
LENGTH = 3


def why_not_mixed(runner: ModelRunner, choices: AdapterChoices, mixed: MixedLayers, adapters: Many[str]) -> str:
    """Why these adapters need a forward each; empty where one does for all. `runner` has blocks to spare."""
    prompts = prompts_of(runner, [LENGTH] * len(adapters))
    try:
        with sequences(runner, len(adapters)) as blocks:
            pieces = [Piece(b, 0, p, 1, name) for b, p, name in zip(blocks, prompts, adapters, strict=True)]
            alone = torch.cat([_alone(runner, choices, piece) for piece in pieces])
        with sequences(runner, len(adapters)) as blocks:
            pieces = [Piece(b, 0, p, 1, name) for b, p, name in zip(blocks, prompts, adapters, strict=True)]
            with mixed.over(row_of(pieces)):
                together = runner.forward(pieces)
    except MixedForwardError as error:
        return error.reason
    except (OutOfBlocksError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a layer that cannot be asked about a part of the tokens
        return f"{type(error).__name__}: {error}"
    return "" if are_close(together, alone) else "a layer of it gives other numbers for tokens of several adapters"


def row_of(pieces: Many[Piece]) -> Row:
    """Of a packed forward. Where no logits are wanted, the head is given the last token."""
    kept = [(piece.adapter, piece.logits) for piece in pieces]
    if not any(count for _, count in kept):
        kept = [(pieces[-1].adapter, 1)]
    return Row([(piece.adapter, len(piece.token_ids)) for piece in pieces], kept)


def _alone(runner: ModelRunner, choices: AdapterChoices, piece: Piece) -> Tensor:
    with choices.chosen(piece.adapter) if piece.adapter is not None else contextlib.nullcontext():
        return runner.forward([piece])
