"""What a step, and all that run together, may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hfpaged.engine.request import Request

# The most prompt tokens in one step of a request that wants to see the logits of each: rows of a whole vocabulary.
PROMPT_LOGITS = 256


@dataclass(frozen=True)
class Limits:
    """max_num_seqs sequences at once; max_num_batched_tokens in one step (the token budget); `watermark`, a share of
    the pool that admission leaves free for those who run. `whole_prompts`: the model cannot take a prompt in chunks;
    one that is longer than the budget is the only one in its step then.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float = 0.01
    whole_prompts: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Those that people set, by name."""
        return {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}

    def logits_of(self, request: Request) -> int:
        """The most tokens that this request may bring in one step: few where the logits of all are seen."""
        return PROMPT_LOGITS if request.wants_prompt_logits and not self.whole_prompts else sys.maxsize
