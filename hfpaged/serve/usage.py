"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hfpaged.engine.outputs import RequestOutput


def usage_of(outputs: Iterable[RequestOutput], *, counts_new: bool = True) -> dict[str, Any]:
    """OpenAI's usage of requests that were one for their client. New tokens are those of all samples, of best_of also
    those that were not chosen; with counts_new=False there are none, as those there were are not told.
    """
    prompt = cached = new = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens
        new += max(output.metrics.new_tokens, sum(seq.tokens.stop - seq.tokens.start for seq in output.sequences))
    new = new if counts_new else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
