"""Prompts of random tokens that begin alike, and some that never do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hfpaged.bench.generation import Rows
from hfpaged.bench.random_prompts import random_ids, random_lengths
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape


def prompts_of(setting: Setting, shape: Shape) -> Rows:
    """`shape.batch` prompts; each ends with half of `shape.own` to `shape.own` tokens that are not in common."""
    return alike(setting, shape.prompt, random_lengths(shape.batch, max(shape.own // 2, 1), max(shape.own, 1)))


def alike(setting: Setting, common: int, own: Sequence[int]) -> Rows:
    """Prompts that begin with the same `common` tokens; own[i] others follow in prompt i."""
    rows: Rows = random_ids(setting, len(own), common + max(own)).tolist()
    return [rows[0][:common] + row[common : common + count] for row, count in zip(rows, own, strict=True)]


def unlike(setting: Setting, count: int, length: int) -> Tensor:
    """[count, length]: no two rows begin with the same token, as long as there are enough of them."""
    ids = random_ids(setting, count, length)
    ids[:, 0] = random_ids(setting, 1, 8 * count).unique()[:count]
    return ids
