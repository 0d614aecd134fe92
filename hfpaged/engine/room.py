"""How much a request could get if it asked for all that there is."""

from __future__ import annotations

import bisect

from hfpaged.engine.batcher import ContinuousBatcher


def most_new_tokens(batcher: ContinuousBatcher, num_prompt: int) -> int:
    """How many tokens a prompt of so many can get without being refused: what is left of the model's context, or what
    the pool holds; 0 for none.
    """
    parts = batcher._parts
    pool, needs = batcher.pool, parts.scheduler.needs
    most = pool.num_blocks * pool.block_size - num_prompt  # of a pool of windows alone more could be
    if parts.max_model_len is not None:
        most = parts.max_model_len - num_prompt
    most = max(most, 0)
    if (edge := parts.runner.changes_between(num_prompt, num_prompt + most)) is not None:
        most = edge - num_prompt
    # Needs only grow with the length, so that the first one that is too long can be searched for.
    return bisect.bisect_left(
        range(1, most + 1), True, key=lambda new: needs.at_most(num_prompt, new) > pool.num_blocks
    )  # fmt: skip
