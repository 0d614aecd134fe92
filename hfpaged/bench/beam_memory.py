"""Row beam-memory: the most that keys and values take while beams grow from one prompt."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN, SIDES, Side
from hfpaged.bench.watch import Peak

BEAMS = 4


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the peak of hfpaged as a part of that of transformers."""
    prompt = random_ids(setting, shape.batch, shape.prompt)
    peaks, rows = {}, {}
    for side in SIDES:
        peaks[side.name], rows[side.name] = _peak(setting, side, prompt, shape.new)
    return Measured(
        value=peaks[PAGED.name] / peaks[PLAIN.name],
        plain=peaks[PLAIN.name] / 1e6,
        paged=peaks[PAGED.name] / 1e6,
        unit="MB",
        same_tokens=rows[PLAIN.name] == rows[PAGED.name],
    )


def _peak(setting: Setting, side: Side, prompt: Tensor, new: int) -> tuple[int, Rows]:
    side.switch(setting.model)
    cache = side.make_cache(setting.model)
    peak = Peak(partial(side.kv_bytes, cache))
    rows = generate(setting.model, prompt, cache, new, watch=peak, min_new_tokens=new, num_beams=BEAMS)
    return peak.largest, rows
