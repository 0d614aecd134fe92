"""Row tokens: whether generate() gives the same with both caches, padding and beams included."""

from __future__ import annotations

from torch import Tensor

from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.random_prompts import left_padded, random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import SIDES
from hfpaged.bench.texts import texts, word_counts

BATCHES = 4
BEAMS = (1, 4)


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the share of rows that are equal, over all batches and numbers of beams."""
    prompts = _prompts(setting, shape)
    equal = []
    for start in range(0, len(prompts), shape.batch):
        ids, mask = left_padded(prompts[start : start + shape.batch], setting.device)
        for beams in BEAMS:
            plain, paged = _both(setting, ids, mask, shape.new, beams)
            # A row may be of another length on the other side, and is different then.
            equal += [a == b for a, b in zip(plain, paged, strict=True)]
    source = "texts" if setting.tokenizer is not None else "random tokens, the model has no tokenizer"
    note = f"{sum(equal)} of {len(equal)} rows ({source})"
    return Measured(sum(equal) / len(equal), same_tokens=all(equal), note=note)


def _prompts(setting: Setting, shape: Shape) -> Rows:
    count = BATCHES * shape.batch
    if setting.tokenizer is not None:
        encoded: Rows = setting.tokenizer(texts(count))["input_ids"]
        return [row[: shape.prompt] for row in encoded]
    rows: Rows = random_ids(setting, count, shape.prompt).tolist()
    return [row[:length] for row, length in zip(rows, word_counts(count), strict=True)]


def _both(setting: Setting, ids: Tensor, mask: Tensor, new: int, beams: int) -> list[Rows]:
    results = []
    for side in SIDES:
        side.switch(setting.model)
        cache = side.make_cache(setting.model)
        results.append(generate(setting.model, ids, cache, new, mask=mask, num_beams=beams))
    return results
