"""Logarithms of the probabilities that the model itself gave, before any processor changed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfpaged.engine.outputs import PositionLogprobs, TokenLogprob


def position_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[PositionLogprobs]:
    """For each row of `logits` [rows, vocab] its token's logprob and rank, and those of the counts[row] likeliest
    tokens. Natural logarithms, float32. Of tokens that are equally likely each has the best rank.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = scores.gather(1, ids)
    ranks = (scores > chosen).sum(dim=-1) + 1
    best, best_ids = scores.topk(min(max(counts, default=0), scores.shape[-1]), dim=-1)
    columns = zip(
        token_ids, chosen[:, 0].tolist(), ranks.tolist(), best.tolist(), best_ids.tolist(), counts, strict=True
    )
    return [
        PositionLogprobs(token_id, logprob, rank, _top(row_best[:count], row_ids[:count]))
        for token_id, logprob, rank, row_best, row_ids, count in columns
    ]


def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], count: int) -> list[PositionLogprobs]:
    """Of each of `next_tokens`, the tokens that follow those of which `logits` [tokens, vocab] were computed."""
    return position_logprobs(logits, next_tokens, [count] * len(next_tokens))


def _top(logprobs: list[float], token_ids: list[int]) -> tuple[TokenLogprob, ...]:
    pairs = zip(token_ids, logprobs, strict=True)
    return tuple(TokenLogprob(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(pairs, start=1))
