"""Row gap: how long a running stream waits for its next token while a long prompt is taken in."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from hfpaged.bench.batch_ours import batcher_of
from hfpaged.bench.batch_static import static
from hfpaged.bench.batch_workload import Workload
from hfpaged.bench.prefix_prompts import unlike
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape

WARM_UP = 200  # prompt tokens, more than one step takes beside a stream


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
    stream = stream[: shape.own]
    few = replace(shape, prompt=min(shape.prompt, WARM_UP), new=2)
    _run(setting, few, stream, prompt[: few.prompt])  # kernels are compiled on first use
    runs = [_run(setting, shape, stream, prompt) for _ in range(setting.repeats)]
    run = sorted(runs, key=lambda run: run.ratio)[len(runs) // 2]
    same = all(_is_right(setting, stream, prompt, run) for run in runs)
    note = (
        f"longest {1e3 * max(run.during):.0f} ms, median {1e3 * statistics.median(run.before):.0f} ms; "
        f"prompt taken in after {sum(run.during):.1f} s, {len(run.during)} tokens of the stream"
    )
    return Measured(run.ratio, same_tokens=same, note=note, values=tuple(each.ratio for each in runs))


class _Stream:
    """The requests of a batcher, whose steps are made here; `held` has the new tokens of each."""

    def __init__(self, setting: Setting, batcher: Any) -> None:
        self._setting, self._batcher = setting, batcher
        self.held: dict[str, list[int]] = {}

    def add(self, prompt: list[int], new: int) -> str:
        """A new request; its name."""
        config = GenerationConfig(do_sample=False, max_new_tokens=new)
        name: str = self._batcher.add_request(prompt, config)
        self.held[name] = []
        return name

    def gap(self, name: str) -> float:
        """Seconds until this request has its next token, however many steps that takes."""
        start, before = time.perf_counter(), len(self.held[name])
        while len(self.held[name]) == before:
            for output in self._batcher.step():
                self.held[output.request_id] = output.token_ids
        self._setting.synchronize()
        return time.perf_counter() - start


def _run(setting: Setting, shape: Shape, stream: list[int], prompt: list[int]) -> Disturbed:
    """The stream alone for `shape.new` tokens, then with the prompt beside it, until that has its first token."""
    most = shape.new + shape.prompt  # it must not end before: each of its steps takes a token of the prompt in
    with batcher_of(setting, 2 * (most + shape.prompt)) as batcher:
        steps = _Stream(setting, batcher)
        running = steps.add(stream, most)
        steps.gap(running)  # the first token waits for the stream's own prompt
        before = [steps.gap(running) for _ in range(shape.new)]
        arrived = steps.add(prompt, 2)
        during: list[float] = []
        while not steps.held[arrived]:
            during.append(steps.gap(running))
        return Disturbed(before, during, steps.held[running], steps.held[arrived])


def _is_right(setting: Setting, stream: list[int], prompt: list[int], run: Disturbed) -> bool:
    """Whether both answers are those of generate() to each prompt alone."""
    workload = Workload([stream, prompt], [len(run.stream), len(run.answer)])
    return static(setting, workload, 1).rows == [run.stream, run.answer]
