"""The query rows of a tile, one in each lane: laid out so, begun, weighed, merged and written.

The state of one vector of rows, float32, all with 16 lanes: maximum, sum, totals [padded(value_dim)].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    LANES,
    VECTOR,
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
    fused,
    larger,
    largest,
    multiply,
    splat,
    subtract,
    tanh,
    where_at_most,
)
from hfpaged_kernels.cpu_strips import STRIP


@njit(forceinline=True)
def vectors_of(rows: int) -> int:
    return (rows + LANES - 1) // LANES


@njit(forceinline=True)
def state_bytes(width: int) -> int:
    """Of one vector of rows."""
    return (2 + width) * VECTOR


@njit(nogil=True)
def begin_rows(state: int, vectors: int, sinks: int, first_row: int, group: int, width: int) -> None:
    """A sink counts as a key that was seen before all others: its logit is the maximum, its weight 1."""
    for row in range(vectors * LANES):
        logit = load_one(sinks + 4 * ((first_row + row) % group)) if sinks != 0 else NOTHING
        at = state + row // LANES * state_bytes(width) + row % LANES * 4
        store_one(at, logit)
        store_one(at + VECTOR, 1.0 if sinks != 0 else 0.0)
    for vector in range(vectors):
        clear_bytes(state + vector * state_bytes(width) + 2 * VECTOR, width * VECTOR)


@njit(nogil=True)
def turn_queries(
    query: int, kind: int, stride: int, head_stride: int, first_row: int, rows: int, group: int, dim: int,
    scale: float, buffer: int, target: int,
) -> None:  # fmt: skip
    """Rows of one KV head's queries, scaled, into target[vectors, dim, 16]."""
    clear_bytes(target, vectors_of(rows) * VECTOR * dim)
    for row in range(rows):
        token = (first_row + row) // group
        source = query + token * stride + (first_row + row - token * group) * head_stride
        convert(source, kind, buffer, FLOAT32, dim)
        column = target + row // LANES * VECTOR * dim + row % LANES * 4
        for d in range(dim):
            store_one(column + d * VECTOR, load_one(buffer + 4 * d) * np.float32(scale))


@njit(nogil=True)
def limit(scores: int, softcap: float) -> None:
    cap, inverse = splat(softcap), splat(np.float32(1.0) / np.float32(softcap))
    for key in range(STRIP):
        at = scores + key * VECTOR
        store(at, multiply(cap, tanh(multiply(load(at), inverse))))


@njit(nogil=True)
def hide(scores: int, position: int, positions: Any, window: int) -> None:
    """Minus infinity for the keys (from `position` on) that a row does not see."""
    hidden = splat(-np.inf)
    oldest = subtract(positions, splat(np.float32(window - 1)))
    for key in range(STRIP):
        at, here = scores + key * VECTOR, splat(np.float32(position + key))
        score = where_at_most(here, positions, load(at), hidden)
        if window > 0:
            score = where_at_most(oldest, here, score, hidden)
        store(at, score)


@njit(nogil=True)
def weigh_rows(scores: int, state: int, width: int) -> None:
    """Scores become weights under the new maxima, under which all that was summed before is brought as well."""
    old = load(state)
    a, b, c, d = old, old, old, old
    for key in range(0, STRIP, 4):
        at = scores + key * VECTOR
        a, b = larger(load(at), a), larger(load(at + VECTOR), b)
        c, d = larger(load(at + 2 * VECTOR), c), larger(load(at + 3 * VECTOR), d)
    top = larger(larger(a, b), larger(c, d))
    added = load(state + VECTOR)
    if largest(subtract(top, old)) > 0:
        factor = exp(subtract(old, top))
        added = multiply(added, factor)
        for at in range(state + 2 * VECTOR, state + state_bytes(width), VECTOR):
            store(at, multiply(load(at), factor))
        store(state, top)
    for key in range(STRIP):
        weight = exp(subtract(load(scores + key * VECTOR), top))
        store(scores + key * VECTOR, weight)
        added = add(added, weight)
    store(state + VECTOR, added)


@njit(nogil=True)
def merge_rows(state: int, other: int, vectors: int, width: int) -> None:
    """Add the partial result `other` to `state`."""
    for vector in range(vectors):
        mine, theirs = state + vector * state_bytes(width), other + vector * state_bytes(width)
        top = larger(load(mine), load(theirs))
        kept, taken = exp(subtract(load(mine), top)), exp(subtract(load(theirs), top))
        store(mine, top)
        # The sum and the totals.
        for at in range(VECTOR, state_bytes(width), VECTOR):
            store(mine + at, fused(load(mine + at), kept, multiply(load(theirs + at), taken)))


@njit(nogil=True)
def read_row(state: int, row: int, width: int, maximum: int, total: int, totals: int) -> None:
    """The state of one row, out of its lane: its maximum, its sum and its totals[width]."""
    lane = state + row // LANES * state_bytes(width) + row % LANES * 4
    store_one(maximum, load_one(lane))
    store_one(total, load_one(lane + VECTOR))
    for d in range(width):
        store_one(totals + 4 * d, load_one(lane + (2 + d) * VECTOR))


@njit(nogil=True)
def finish_rows(
    state: int, rows: int, first_row: int, group: int, width: int, dim: int, buffer: int, out: int, kind: int,
    token_bytes: int,
) -> None:  # fmt: skip
    """Divide by the sums and write the rows; `out` is the head's first token. Takes a buffer of width + 2."""
    total = buffer + 4 * width
    for row in range(rows):
        read_row(state, row, width, total + 4, total, buffer)
        inverse = splat(np.float32(1.0) / load_one(total))
        for column in range(buffer, total, VECTOR):
            store(column, multiply(load(column), inverse))
        token = (first_row + row) // group
        head = first_row + row - token * group
        convert(buffer, FLOAT32, out + token * token_bytes + head * dim * size_of(kind), kind, dim)
