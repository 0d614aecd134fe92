"""Padding as bool arrays [batch, length], False where there is some; None where there is none."""

from __future__ import annotations

import numpy as np

from hfpaged.content import Bools

Shape = tuple[int, int]


def extended(past: Bools | None, past_shape: Shape, new: Bools | None, new_shape: Shape) -> Bools | None:
    """What was kept before and what is kept of the positions behind it, side by side."""
    if past is None and new is None:
        return None
    before = past if past is not None else np.ones(past_shape, dtype=bool)
    behind = new if new is not None else np.ones(new_shape, dtype=bool)
    return np.concatenate([before, behind], axis=1)


def ends_in_padding(kept: Bools | None, new: Bools) -> bool:
    """Whether the last positions of `kept`, which are `new`, have padding behind a token of its row."""
    if kept is None:
        return False
    behind_a_token = np.maximum.accumulate(kept, axis=1)[:, -new.shape[1] :] & ~new
    return bool(behind_a_token.any())


def tokens_among(kept: Bools | None, batch: int, length: int) -> list[int]:
    """How many of the first `length` positions of each row are no padding."""
    return [length] * batch if kept is None else kept[:, :length].sum(axis=1).tolist()
