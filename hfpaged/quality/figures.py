"""What comparing a format with the native cache gives."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.quality.contexts import Context


@dataclass(frozen=True)
class Figures:
    """One format at one context length. Shares and changes are parts of 1, KL is in nats.

    `ppl_error` is the standard error of `ppl_change`. `parts_at` is the first new token, counted from 1, in which any
    of the greedy generations of `generated` tokens differs from the native one; None where none does. `kl_by_position`
    is the mean over all texts for each token that was fed, the first at position `context.prompt`. Bytes are those of
    blocks, scales included; `bytes_per_sequence` come on top of them, for an unfilled block that is not quantized yet.
    """

    format: str
    context: Context
    scored: int
    perplexity_native: float
    perplexity: float
    ppl_change: float
    ppl_error: float
    kl_mean: float
    kl_p99: float
    top1: float
    generated: int
    parts_at: int | None
    equal_generations: float
    rouge_l: float
    bytes_per_token: float
    bytes_per_sequence: int
    of_native: float
    of_bfloat16: float
    kl_by_position: tuple[float, ...]
