"""The two products of tiles: vectors of query rows with a strip of keys, their weights with a strip of values."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from hfpaged_kernels.cpu_bits import FLOATS, LANES, VECTOR, emitter, fuse, read, splat_of, write
from hfpaged_kernels.cpu_rows import state_bytes
from hfpaged_kernels.cpu_strips import STRIP

_COLUMNS = 8


def _products_of(vectors: int, fresh: bool) -> Any:
    """Products of `count` lanes with eight columns of scalars, for one vector or two:

    target[v, c] = (0 if fresh else target[v, c]) + sum over i of scalars[i, c] * operands[v, i]

    Strides, in bytes: of a scalar's row and column (row 16 and those behind it lie `jump` further), of a vector of
    operands, of a vector of the target.
    """

    @emitter(types.void, *[types.int64] * 9)
    def products(
        builder: Any, scalars: Any, row_bytes: Any, jump: Any, column_bytes: Any, operands: Any, operand_bytes: Any,
        count: Any, target: Any, target_bytes: Any,
    ) -> None:  # fmt: skip
        index = ir.IntType(64)

        def place(base: Any, number: Any, step: Any) -> Any:
            number = ir.Constant(index, number) if isinstance(number, int) else number
            step = ir.Constant(index, step) if isinstance(step, int) else step
            return builder.add(base, builder.mul(number, step))

        def target_of(v: int, c: int) -> Any:
            return place(place(target, v, target_bytes), c, VECTOR)

        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(_COLUMNS)] for _ in range(vectors)]
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        for v in range(vectors):
            for c in range(_COLUMNS):
                builder.store(zero if fresh else read(builder, target_of(v, c)), sums[v][c])
        start, step = ir.Constant(index, 0), ir.Constant(index, 1)
        with cgutils.for_range_slice(builder, start, count, step, intp=index) as (i, _):
            at = place(operands, i, VECTOR)
            rows = [read(builder, place(at, v, operand_bytes)) for v in range(vectors)]
            behind = builder.icmp_signed(">=", i, ir.Constant(index, LANES))
            row = builder.add(place(scalars, i, row_bytes), builder.select(behind, jump, start))
            for c in range(_COLUMNS):
                scalar = splat_of(builder, place(row, c, column_bytes))
                for v in range(vectors):
                    builder.store(fuse(builder, scalar, rows[v], builder.load(sums[v][c])), sums[v][c])
        for v in range(vectors):
            for c in range(_COLUMNS):
                write(builder, target_of(v, c), builder.load(sums[v][c]))

    return products


_products_of_one, _products_of_two = _products_of(1, fresh=True), _products_of(2, fresh=True)
_add_products_to_one, _add_products_to_two = _products_of(1, fresh=False), _products_of(2, fresh=False)


@njit(nogil=True)
def score_rows(queries: int, pair: bool, dim: int, keys: int, jump: int, key_bytes: int, scores: int) -> None:
    """scores[1 or 2, STRIP, 16] of one vector of query rows or a pair."""
    for key in range(0, STRIP, _COLUMNS):
        row, at = keys + key * key_bytes + (jump if key >= LANES else 0), scores + key * VECTOR
        if pair:
            _products_of_two(row, 4, 0, key_bytes, queries, dim * VECTOR, dim, at, STRIP * VECTOR)
        else:
            _products_of_one(row, 4, 0, key_bytes, queries, dim * VECTOR, dim, at, STRIP * VECTOR)


@njit(nogil=True)
def add_values(state: int, pair: bool, weights: int, values: int, jump: int, width: int, count: int) -> None:
    """totals[1 or 2, width, 16] += values[count, width].T @ weights[1 or 2, count, 16]."""
    row_bytes, gap = 4 * width, STRIP * VECTOR
    for column in range(0, width, _COLUMNS):
        at, scalars = state + (2 + column) * VECTOR, values + 4 * column
        if pair:
            _add_products_to_two(scalars, row_bytes, jump, 4, weights, gap, count, at, state_bytes(width))
        else:
            _add_products_to_one(scalars, row_bytes, jump, 4, weights, gap, count, at, state_bytes(width))
