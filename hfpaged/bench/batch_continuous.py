"""The rival with the same aim: transformers' own continuous batching, what generate_batch() is made of.

generate_batch() itself has one length for all answers. Its manager takes one for each request.
"""

from __future__ import annotations

import time
from typing import Any

import transformers
from transformers import GenerationConfig

import hfpaged
from hfpaged.bench.batch_workload import Run, Workload, endless
from hfpaged.bench.setting import Setting

PAGE = 256  # tokens, its default
PATIENCE = 1.0  # seconds; a thread that has died is noticed after so many


def obstacle(setting: Setting) -> str | None:
    """Why it cannot run this model here, None where it can."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        return f"transformers {transformers.__version__} has no ContinuousBatchingConfig"
    hfpaged.unpatch(setting.model)
    attention = setting.model.config._attn_implementation
    return None if attention == "sdpa" else f"generate_batch is measured with sdpa, and this model uses {attention}"


def continuous(setting: Setting, workload: Workload, pool: int) -> Run:
    """All requests at once, over a pool of `pool` tokens. Making the pool is not on the clock.

    Raises RuntimeError where it gives fewer answers than there are requests.
    """
    hfpaged.unpatch(setting.model)
    with endless(setting.model):
        options = GenerationConfig(do_sample=False, max_new_tokens=max(workload.new), eos_token_id=-1)  # no token
        with setting.model.continuous_batching_context_manager(
            generation_config=options, continuous_batching_config=_config(pool), block=True, timeout=5
        ) as manager:
            start = time.perf_counter()
            names = [
                manager.add_request(prompt, max_new_tokens=new)
                for prompt, new in zip(workload.prompts, workload.new, strict=True)
            ]
            found = _collect(manager, len(names))
            seconds = time.perf_counter() - start
    return Run([found[name] for name in names], seconds)


def _config(pool: int) -> Any:
    config = transformers.ContinuousBatchingConfig
    page = "page_size" if hasattr(config, "page_size") else "block_size"  # renamed after 5.17
    return config(**{page: PAGE}, num_blocks=-(-pool // PAGE), auto_switch_to_flash=False)


def _collect(manager: Any, count: int) -> dict[str, list[int]]:
    """The new tokens of `count` requests by their names."""
    found: dict[str, list[int]] = {}
    while len(found) < count:
        result = manager.get_result(timeout=PATIENCE)
        if result is None and not manager.is_running():
            raise RuntimeError(f"generate_batch ended after {len(found)} of {count} requests")
        if result is not None and result.error is not None:
            raise RuntimeError(f"generate_batch failed: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
    return found
