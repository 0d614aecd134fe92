# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Device functions of the attention kernels: they see loaded values only, no pointers."""

import triton
import triton.language as tl


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap), by an exponential that cannot overflow (tl has no tanh on all targets)."""
    ratio = scores / cap
    decay = tl.exp(-2.0 * tl.abs(ratio))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return cap * tl.where(ratio < 0, -magnitude, magnitude)


@triton.jit
def attention_scores(
    query, keys, factors, scale, softcap, HAS_FACTORS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):  # fmt: skip
    """float32 scores [rows, tile] of query [rows, dim] and keys [tile, dim], these times `factors` [tile] if any."""
    # "ieee": float32 models must give the tokens that plain torch gives, so no TF32.
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if HAS_FACTORS:
        scores *= factors[None, :]
    if HAS_SOFTCAP:
        scores = soft_cap(scores, softcap)
    return scores


@triton.jit
def fold_in(accumulator, maximum, total, scores, values, factors, HAS_FACTORS: tl.constexpr):
    """Online softmax: take scores [rows, tile] (-inf where hidden) and values [tile, dim], times `factors` [tile] if
    they have any, into the state.

    The state is the sum of weighted values [rows, dim], the largest score and the sum of weights [rows].
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    pivot = _finite(new_maximum)
    weights = tl.exp(scores - pivot[:, None])
    decay = tl.exp(maximum - pivot)
    accumulator = accumulator * decay[:, None]
    scaled = weights
    if HAS_FACTORS:
        scaled = weights * factors[None, :]
    accumulator += tl.dot(scaled.to(values.dtype), values, input_precision="ieee")
    total = total * decay + tl.sum(weights, 1)
    return accumulator, new_maximum, total


@triton.jit
def final_weight(maximum, total, sink):
    """The factor of a finished accumulator; the logit `sink` joins the softmax, -inf is none."""
    pivot = _finite(tl.maximum(maximum, sink))
    decay = tl.exp(maximum - pivot)
    denominator = total * decay + tl.exp(sink - pivot)
    # A row that saw no key at all has 0 / 0 here and must become zeros.
    return decay / tl.where(denominator == 0.0, 1.0, denominator)


@triton.jit
def merge_states(accumulators, maxima, totals):
    """One state, [dim] and two scalars, of those of all splits: [splits, dim], [splits], [splits]."""
    maximum = tl.max(maxima, 0)
    decay = tl.exp(maxima - _finite(maximum))
    return tl.sum(accumulators * decay[:, None], 0), maximum, tl.sum(totals * decay, 0)


@triton.jit
def _finite(maximum):
    """Replaces -inf, the maximum of a row without keys: -inf - -inf would be nan."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
