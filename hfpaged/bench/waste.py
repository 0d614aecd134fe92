"""Row waste: the part of the blocks in use that no token fills."""

from __future__ import annotations

from hfpaged.bench.generation import generate
from hfpaged.bench.random_prompts import left_padded, random_ids, random_lengths
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED


def measure(setting: Setting, shape: Shape) -> Measured:
    """Prompts of random lengths, from half of the shape's length on."""
    lengths = random_lengths(shape.batch, shape.prompt // 2, shape.prompt)
    rows = random_ids(setting, shape.batch, shape.prompt).tolist()
    ids, mask = left_padded([row[:length] for row, length in zip(rows, lengths, strict=True)], setting.device)
    PAGED.switch(setting.model)
    cache = PAGED.make_cache(setting.model)
    generate(setting.model, ids, cache, shape.new, mask=mask, min_new_tokens=shape.new)
    stats = cache.stats()
    return Measured(stats.waste_ratio, note=f"{stats.tokens} tokens in {stats.blocks_used} blocks")
