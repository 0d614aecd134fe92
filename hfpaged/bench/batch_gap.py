"""Row gap: how long a running stream waits for its next token while a long prompt is taken in."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hfpaged.bench.batch_ours import batcher_of
from hfpaged.bench.batch_static import static
from hfpaged.bench.batch_workload import Workload
from hfpaged.bench.prefix_prompts import unlike
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape

OWN_PROMPT = 64  # tokens, of the stream


@dataclass(frozen=True)
class Disturbed:
    """Seconds between tokens of the stream before the prompt came and while it was taken in, and both answers."""

    before: list[float]
    during: list[float]
    stream: list[int]
    answer: list[int]

    @property
    def ratio(self) -> float:
        """The longest gap over the median of the undisturbed ones."""
        return max(self.during) / statistics.median(self.before)


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the longest gap while the prompt is taken in, over the median gap before it came."""
    stream, prompt = unlike(setting, 2, shape.prompt).tolist()
    stream = stream[:OWN_PROMPT]
    runs = [_run(setting, shape, stream, prompt) for _ in range(setting.repeats)]
    run = sorted(runs, key=lambda run: run.ratio)[len(runs) // 2]
    same = all(_is_right(setting, stream, prompt, run) for run in runs)
    note = (
        f"longest {1e3 * max(run.during):.0f} ms, median {1e3 * statistics.median(run.before):.0f} ms; "
        f"prompt taken in after {sum(run.during):.1f} s, {len(run.during)} tokens of the stream"
    )
    return Measured(run.ratio, same_tokens=same, note=note)


def _run(setting: Setting, shape: Shape, stream: list[int], prompt: list[int]) -> Disturbed:
    """The stream alone for `shape.new` tokens, then with the prompt beside it, until that has its first token."""
    most = shape.new + shape.prompt + 1  # it must not end before: a step takes in one token of the prompt or more
    with batcher_of(setting, 2 * (most + shape.prompt)) as batcher:
        running = batcher.add_request(stream, generation_config=_config(most))
        before: list[float] = []
        _gap(setting, batcher, running)  # its first token waits for its own prompt
        while len(running.token_ids) < shape.new:
            before.append(_gap(setting, batcher, running))
        arrived = batcher.add_request(prompt, generation_config=_config(2))
        during: list[float] = []
        while not arrived.token_ids:
            during.append(_gap(setting, batcher, running))
        answers = list(running.token_ids), list(arrived.token_ids)
        batcher.abort(running)
    return Disturbed(before, during, *answers)


def _gap(setting: Setting, batcher: Any, running: Any) -> float:
    """Seconds until the stream has its next token, however many steps that takes."""
    start, held = time.perf_counter(), len(running.token_ids)
    while len(running.token_ids) == held:
        batcher.step()
    setting.synchronize()
    return time.perf_counter() - start


def _is_right(setting: Setting, stream: list[int], prompt: list[int], run: Disturbed) -> bool:
    """Whether both answers are those of generate() to each prompt alone."""
    workload = Workload([stream, prompt], [len(run.stream), len(run.answer)])
    return static(setting, workload, 1).rows == [run.stream, run.answer]


def _config(new: int) -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=new)
