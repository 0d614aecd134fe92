"""Row prefill: one forward over a whole prompt into an empty cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hfpaged.bench.generation import Rows, first_tokens
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN, SIDES, Side
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import alternate


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the ratio of speeds; the tokens compared are the first new ones."""
    prompt = random_ids(setting, shape.batch, shape.prompt)
    runs: dict[str, Callable[[], Rows]] = {side.name: partial(_prefill, setting, side, prompt) for side in SIDES}
    tokens = {name: run() for name, run in runs.items()}
    times = alternate(runs, setting.repeats, warmup=0)
    plain, paged = ([prompt.numel() / seconds for seconds in times[side.name]] for side in (PLAIN, PAGED))
    return in_pairs(plain, paged, "tok/s", tokens[PLAIN.name] == tokens[PAGED.name])


def _prefill(setting: Setting, side: Side, prompt: Tensor) -> Rows:
    side.switch(setting.model)
    # tolist() waits for the device, which timing relies on.
    rows: Rows = first_tokens(setting.model, prompt, side.make_cache(setting.model)).tolist()
    return rows
