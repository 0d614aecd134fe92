# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""The rows of an attention kernel, [rows, pad]: queries come in, results go out, sinks stand beside them."""

import triton
import triton.language as tl


@triton.jit
def load_rows(source_ptr, offsets, real, DIM: tl.constexpr, PAD: tl.constexpr):
    """[rows, PAD]: the `real` rows at `offsets`; zeros for the others and behind DIM."""
    dims = tl.arange(0, PAD)
    return tl.load(source_ptr + offsets[:, None] + dims[None, :], mask=real[:, None] & (dims[None, :] < DIM), other=0.0)


@triton.jit
def store_rows(target_ptr, rows, values, real, DIM: tl.constexpr, PAD: tl.constexpr):
    """Write the `real` ones of values [rows, PAD] to `rows` of a dense [.., DIM], in the dtype that is there."""
    dims = tl.arange(0, PAD)
    tl.store(
        target_ptr + (rows * DIM)[:, None] + dims[None, :],
        values.to(target_ptr.dtype.element_ty),
        mask=real[:, None] & (dims[None, :] < DIM),
    )


@triton.jit
def load_sinks(sinks_ptr, heads, real, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The sink logit of each row, float32; -inf is none."""
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=real, other=float("-inf")).to(tl.float32)
    return sink
