"""What the inputs of a forward say of the coming step: padding, and rows that are equal."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hfpaged.errors import CacheMismatchError
from hfpaged.rows import Bools, Rows, StepPlan


def plan_step(rows: Rows, attention_mask: Tensor | None, input_ids: Tensor | None) -> StepPlan | None:
    """`attention_mask` [batch, past + query_length] with 0 for padding, `input_ids` [batch, query_length].

    None when the inputs do not tell. Raises CacheMismatchError when positions are asked for that were not stored.
    """
    kept = _kept(rows, attention_mask)
    if input_ids is None or rows.length:
        return None if kept is None else StepPlan(kept, list(range(len(kept))))
    ids = input_ids.cpu().numpy()
    if kept is not None and kept.shape != ids.shape:
        return None
    return StepPlan(kept, _first_equal_rows(ids, kept))


def _kept(rows: Rows, attention_mask: Tensor | None) -> Bools | None:
    """The part of the mask for the new positions, where it holds any padding."""
    if attention_mask is None or attention_mask.ndim != 2:
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


def _first_equal_rows(ids: np.ndarray, kept: Bools | None) -> list[int]:
    """For each row the first one with the same tokens at the same positions."""
    first: dict[bytes, int] = {}
    keys = [row.tobytes() + (b"" if kept is None else kept[index].tobytes()) for index, row in enumerate(ids)]
    return [first.setdefault(key, index) for index, key in enumerate(keys)]
