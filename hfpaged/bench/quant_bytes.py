"""Rows *-bytes-*: what keys and values take in a quantized cache, scales and what is not quantized yet included."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import HQQ_4, HQQ_8, QUANTO_4, Rival, not_measured, obstacle
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import Side, in_format
from hfpaged.bench.stored_prompts import fill, prompt_states
from hfpaged.config import DEFAULT_BLOCK_SIZE


def measure(kv_dtype: str, rival: Rival, setting: Setting, shape: Shape) -> Measured:
    """The value is what hfpaged takes as a part of what transformers takes, after a prompt and new tokens."""
    whole = replace(shape, prompt=shape.prompt + shape.new, new=0)  # all is computed as one prompt
    reason = obstacle(rival, setting, whole)
    if reason is not None:
        return not_measured(reason)
    blocks = shape.batch * -(-(shape.prompt + shape.new) // DEFAULT_BLOCK_SIZE)
    theirs, ours = (_bytes(setting, shape, side) for side in (rival.side, in_format(kv_dtype, blocks)))
    return Measured(ours / theirs, theirs / 1e6, ours / 1e6, "MB", note=rival.name)


def _bytes(setting: Setting, shape: Shape, side: Side) -> int:
    states = prompt_states(setting, shape.batch, shape.prompt + shape.new)
    side.switch(setting.model)
    cache = side.make_cache(setting.model)
    fill(cache, states, stop=shape.prompt)
    fill(cache, states, start=shape.prompt)
    return side.kv_bytes(cache)


int8_hqq = partial(measure, "int8", HQQ_8)
int4_hqq = partial(measure, "int4", HQQ_4)
int4_quanto = partial(measure, "int4", QUANTO_4)
