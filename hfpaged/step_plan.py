"""What the inputs of a forward say of the coming step: padding, and rows that are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfpaged.content import Bools
from hfpaged.errors import CacheMismatchError
from hfpaged.rows import Rows
from hfpaged.step import StepPlan

# Inputs that tell rows apart, with their number of dimensions, the rows first.
_BY_ROW = {"input_ids": 2, "position_ids": 2, "token_type_ids": 2, "inputs_embeds": 3}


def plan_step(rows: Rows, inputs: Mapping[str, Any]) -> StepPlan | None:
    """From the arguments of a forward: `attention_mask` [batch, past + query_length] with 0 for padding, `input_ids`
    [batch, query_length], and all else that may tell rows apart.

    None when they do not tell. Raises CacheMismatchError when positions are asked for that were not stored.
    """
    kept = _kept(rows, inputs.get("attention_mask"))
    ids = inputs.get("input_ids")
    if ids is None or rows.length or (kept is not None and kept.shape != ids.shape):
        return None if kept is None else StepPlan(kept, list(range(len(kept))))
    return StepPlan(kept, _first_equal_rows(inputs, kept))


def has_padding(inputs: Mapping[str, Any]) -> bool:
    """Whether the `attention_mask` of a forward's arguments holds any."""
    mask = inputs.get("attention_mask")
    return isinstance(mask, Tensor) and not bool(mask.all())


def _kept(rows: Rows, attention_mask: Tensor | None) -> Bools | None:
    """The part of the mask for the new positions, where it holds any padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        if rows.kept is not None:
            raise CacheMismatchError(
                "rows of this cache hold padding, which is not stored; pass the attention_mask of all "
                f"{rows.length} positions and the new ones, as generate() does"
            )
        return None
    if attention_mask.shape[1] <= rows.length:
        return None
    mask = attention_mask.cpu().numpy().astype(bool)
    _check_past(rows, mask[:, : rows.length])
    new = mask[:, rows.length :]
    return None if new.all() else new


def _check_past(rows: Rows, mask: Bools) -> None:
    if rows.kept is None or rows.kept.shape != mask.shape:
        return
    lost = np.argwhere(mask & ~rows.kept)
    if len(lost):
        row, position = lost[0]
        raise CacheMismatchError(
            f"row {row}, position {position} was padding when it was computed and is not stored; the attention_mask "
            "asks for it now. Start again with a fresh cache"
        )


def _first_equal_rows(inputs: Mapping[str, Any], kept: Bools | None) -> list[int]:
    """For each row the first one that is given the very same: tokens, padding, and every other input."""
    batch = len(inputs["input_ids"])
    told_apart = [] if kept is None else [torch.from_numpy(kept)]
    for name, given in inputs.items():
        if isinstance(given, Tensor) and given.ndim == _BY_ROW.get(name) and len(given) == batch:
            told_apart.append(given)
        elif not _is_same_for_all(name, given):
            return list(range(batch))  # pictures, say, that belong to rows in a way that is not known here
    first: dict[bytes, int] = {}
    return [first.setdefault(b"".join(_bytes(given[row]) for given in told_apart), row) for row in range(batch)]


def _is_same_for_all(name: str, given: object) -> bool:
    if isinstance(given, Tensor):
        is_padding = name == "attention_mask" and given.ndim == 2  # `kept` says it
        is_shared = name == "position_ids" and given.ndim == 2 and len(given) == 1
        return is_padding or is_shared or given.ndim == 0 or name == "cache_position"
    return name in ("cache", "past_key_values") or given is None or isinstance(given, (bool, int, float, str))


def _bytes(given: Tensor) -> bytes:
    return given.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if given.ndim else str(given).encode()
