"""What decode has made of one sequence so far: the state of its heads.

float32: maxima [heads], sums [heads], totals [heads, padded(value_dim)], of the weights under the maximum so far and of
the values with these weights (the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    LANES,
    clear_bytes,
    convert,
    load,
    load_one,
    size_of,
    store,
    store_one,
)
from hfpaged_kernels.cpu_math import (
    NOTHING,
    add,
    exp,
    lane_numbers,
    larger,
    largest,
    multiply,
    splat,
    subtract,
    tanh,
    total,
    where_at_most,
)
from hfpaged_kernels.cpu_strips import STRIP


@njit(nogil=True)
def begin_state(state: int, group: int, width: int, sinks: int) -> None:
    """A sink counts as a key that was seen before all others: its logit is the maximum, its weight 1."""
    for g in range(group):
        store_one(state + 4 * g, load_one(sinks + 4 * g) if sinks != 0 else NOTHING)
        store_one(state + 4 * (group + g), 1.0 if sinks != 0 else 0.0)
    clear_bytes(state + 8 * group, 4 * group * width)


@njit(forceinline=True)
def _scale_row(row: int, width: int, factor: Any) -> None:
    for column in range(0, 4 * width, 4 * LANES):
        store(row + column, multiply(load(row + column), factor))


@njit(forceinline=True)
def _raise_maximum(state: int, group: int, width: int, g: int, top: float) -> None:
    """What was summed under the old maximum is brought under the new one."""
    factor = exp(splat(load_one(state + 4 * g) - top))
    _scale_row(state + 8 * group + 4 * g * width, width, factor)
    sums = state + 4 * (group + g)
    store_one(sums, total(multiply(splat(load_one(sums)), factor)) / LANES)
    store_one(state + 4 * g, top)


@njit(nogil=True)
def merge(state: int, other: int, group: int, width: int) -> None:
    """Add the partial result `other` to `state`; `other` is used up."""
    for g in range(group):
        top = max(load_one(state + 4 * g), load_one(other + 4 * g))
        _raise_maximum(state, group, width, g, top)
        _raise_maximum(other, group, width, g, top)
        sums = state + 4 * (group + g)
        store_one(sums, load_one(sums) + load_one(other + 4 * (group + g)))
        row, added = state + 8 * group + 4 * g * width, other + 8 * group + 4 * g * width
        for column in range(width):
            store_one(row + 4 * column, load_one(row + 4 * column) + load_one(added + 4 * column))


@njit(nogil=True)
def finish(state: int, group: int, width: int, out: int, out_kind: int, dim: int) -> None:
    """Divide by the sums and write the heads of the group, which lie one after the other in `out`."""
    for g in range(group):
        row = state + 8 * group + 4 * g * width
        _scale_row(row, width, splat(np.float32(1.0) / load_one(state + 4 * (group + g))))
        convert(row, FLOAT32, out + g * dim * size_of(out_kind), out_kind, dim)


@njit(nogil=True)
def weigh(weights: int, count: int, state: int, heads: int, width: int, h: int, scale: float, softcap: float) -> None:
    """Turn the products of one head with a strip of keys into weights, under the maximum so far."""
    top = splat(-np.inf)
    for part in range(0, STRIP, LANES):
        scores = multiply(load(weights + 4 * part), splat(scale))
        if softcap > 0:
            scores = multiply(splat(softcap), tanh(multiply(scores, splat(np.float32(1.0) / softcap))))
        if count < STRIP:
            scores = where_at_most(lane_numbers(), splat(np.float32(count - 1 - part)), scores, splat(-np.inf))
        store(weights + 4 * part, scores)
        top = larger(top, scores)
    highest = largest(top)
    if highest > load_one(state + 4 * h):
        _raise_maximum(state, heads, width, h, highest)
    maximum = splat(load_one(state + 4 * h))
    added = splat(0.0)
    for part in range(0, STRIP, LANES):
        weight = exp(subtract(load(weights + 4 * part), maximum))
        store(weights + 4 * part, weight)
        added = add(added, weight)
    sums = state + 4 * (heads + h)
    store_one(sums, load_one(sums) + total(added))
