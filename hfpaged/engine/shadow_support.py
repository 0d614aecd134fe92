"""Whether a batcher can shadow its requests, and what it needs for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpaged import compat
from hfpaged.engine.loop import EngineLoop
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.shadow import Shadow
from hfpaged.engine.tally import Tally
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import storage_dtype

if TYPE_CHECKING:
    from hfpaged.engine.assembly import Assembly


def check_shadow(share: float, runner: ModelRunner) -> None:
    """Raises InvalidConfigError where there is nothing to compare."""
    if not share:
        return
    kv_format, dtype = runner.cache.pool.kv_format, compat.transformers_model(runner.model).dtype
    parts = [storage_dtype(part, dtype) for each in kv_format.all for part in (each.key, each.value)]
    if all(part == dtype for part in parts):
        raise InvalidConfigError(
            f"shadow={share:g} compares what a quantized KV cache answers with the native one, and this pool keeps "
            f"keys and values in {dtype}, as the model computes them: there is nothing to compare; give it a kv_dtype "
            "such as int8, or leave shadow out"
        )


def attach_shadow(parts: Assembly, loop: EngineLoop, tally: Tally) -> tuple[Shadow, ...]:
    """The hook that a batcher needs for its share; none for a share of 0."""
    if not parts.spec.shadow:
        return ()
    pool = parts.engine.pool
    title, runner = pool.kv_format.title, parts.runner
    as_generate = runner.whole_prompts or runner.cache.keeps_state
    shadow = Shadow(
        parts.spec.shadow, title, parts.router, loop.requests, parts.engine.tells.emit,
        longest_prompt=parts.spec.max_num_batched_tokens if as_generate else None,
    )  # fmt: skip
    loop.spare = shadow
    tally.begin_shadow(title)
    return (shadow,)
