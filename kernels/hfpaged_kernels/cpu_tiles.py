"""Tiles: many query rows of one KV head against a strip of keys and values.

A query row lies in each lane, so that the softmax needs no sum across lanes, and two vectors of rows meet eight
keys (or columns of values) at a time, so that sixteen sums stay in registers.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from hfpaged_kernels.cpu_bits import LANES, VECTOR, load, load_one, padded
from hfpaged_kernels.cpu_dequantizing import has_factors, scale_rows
from hfpaged_kernels.cpu_records import DIM, get
from hfpaged_kernels.cpu_rows import hide, limit, state_bytes, vectors_of, weigh_rows
from hfpaged_kernels.cpu_strips import STRIP, prefetch_strip, read_strip
from hfpaged_kernels.cpu_tile_products import add_values, score_rows


@njit(forceinline=True)
def strips_bytes(key_width: int, width: int) -> int:
    """Room for a strip of keys, a strip of values, and the scores of two vectors of rows."""
    return STRIP * (4 * (key_width + width) + 2 * VECTOR)


@njit(nogil=True)
def _read_half(head: int, table: int, position: int, count: int, target: int, factors: int) -> int:
    strip = read_strip(head, table, position, count, target, factors)
    if has_factors(head):
        scale_rows(strip, padded(get(head, DIM)), count, factors)
    return strip


@njit(nogil=True)
def _read(head: int, table: int, position: int, count: int, buffer: int, factors: int) -> Any:
    """A strip of two times sixteen rows, and how much further the second sixteen lie than right behind the first.

    Sixteen at a time, as so many often lie in one block and need no copy.
    """
    first, half = min(count, LANES), 4 * LANES * padded(get(head, DIM))
    a = _read_half(head, table, position, first, buffer, factors)
    b = _read_half(head, table, position + LANES, count - first, buffer + half, factors)
    return a, b - a - half


@njit(nogil=True)
def _attend_strip(
    queries: int, rows: int, key_dim: int, keys: int, key_jump: int, values: int, value_jump: int, width: int,
    position: int, count: int, positions: int, window: int, softcap: float, scores: int, state: int,
) -> None:  # fmt: skip
    """Fold `count` keys and values, the first of which is at `position`, into the state of all rows that see them."""
    for vector in range(0, vectors_of(rows), 2):
        first, end = vector * LANES, min(rows, (vector + 2) * LANES)
        lowest, highest = load_one(positions + 4 * first), load_one(positions + 4 * (end - 1))
        if position > highest or (window > 0 and position + STRIP <= lowest - window + 1):
            continue
        pair = end - first > LANES
        hides = position + STRIP - 1 > lowest or (window > 0 and position <= highest - window)
        own = state + vector * state_bytes(width)
        score_rows(queries + vector * VECTOR * key_dim, pair, key_dim, keys, key_jump, 4 * padded(key_dim), scores)
        for i in range(2 if pair else 1):
            part = scores + i * STRIP * VECTOR
            if softcap > 0:
                limit(part, softcap)
            if hides:
                hide(part, position, load(positions + (vector + i) * VECTOR), window)
            weigh_rows(part, own + i * state_bytes(width), width)
        add_values(own, pair, scores, values, value_jump, width, count)


@njit(nogil=True)
def attend_strips(
    queries: int, rows: int, positions: int, keys: int, values: int, table: int, first: int, stop: int, end: int,
    window: int, softcap: float, buffer: int, state: int,
) -> None:  # fmt: skip
    """Fold the strips that begin at first .. stop, of a context that ends at `end`, into the state of the rows.

    queries: from `turn_queries`; positions[rows] float32, ascending: where each row is, which sees the keys up to
    there (lanes behind the last row hold -1: they see nothing); keys, values: from `describe_head`; buffer:
    strips_bytes.
    """
    key_dim, width = get(keys, DIM), padded(get(values, DIM))
    value_buffer = buffer + 4 * STRIP * padded(key_dim)
    scores = value_buffer + 4 * STRIP * width
    for position in range(first, stop, STRIP):
        ahead = position + STRIP
        if ahead < stop:
            left = min(STRIP, end - ahead)
            prefetch_strip(keys, table, ahead, left)
            prefetch_strip(values, table, ahead, left)
        count = min(STRIP, end - position)
        # Where the scores will be, there is room for the factors until then.
        own_keys, key_jump = _read(keys, table, position, count, buffer, scores)
        own_values, value_jump = _read(values, table, position, count, value_buffer, scores)
        _attend_strip(
            queries, rows, key_dim, own_keys, key_jump, own_values, value_jump, width, position, count, positions,
            window, softcap, scores, state,
        )  # fmt: skip
