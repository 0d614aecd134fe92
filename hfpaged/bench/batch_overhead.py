"""Rows overhead and overhead-256: what scheduling and bookkeeping take of a step in which all requests decode."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfpaged.bench.batch_ours import batched
from hfpaged.bench.batch_static import static
from hfpaged.bench.batch_steps import Step, Steps
from hfpaged.bench.batch_workload import alike
from hfpaged.bench.random_prompts import SEED
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.turns import in_a_row


def share(setting: Setting, shape: Shape) -> Measured:
    """The value is their part of the median step."""
    runs, same = _runs(setting, shape)
    parts = [statistics.median(step.bookkeeping / step.seconds for step in steps) for steps in runs]
    whole = _milliseconds(runs)
    return in_a_row(parts, same, f"{statistics.median(parts) * whole:.2f} of {whole:.1f} ms; {len(runs[0])} steps")


def milliseconds(setting: Setting, shape: Shape) -> Measured:
    """The value is the milliseconds that they take, whatever the model: it is a stub of one small layer."""
    runs, same = _runs(replace(setting, model=_stub(shape), tokenizer=None), shape)
    values = [1e3 * statistics.median(step.bookkeeping for step in steps) for steps in runs]
    return in_a_row(values, same, f"of {_milliseconds(runs):.1f} ms with the stub; {len(runs[0])} steps")


def _runs(setting: Setting, shape: Shape) -> tuple[list[list[Step]], bool]:
    """By run, the steps in which all decode; and whether the tokens are those of generate()."""
    workload = alike(setting, shape)
    expected = static(setting, workload, shape.batch).rows
    watches = [Steps() for _ in range(setting.repeats)]
    pool = 2 * shape.batch * (shape.prompt + shape.own + shape.new)
    same = [batched(setting, workload, pool, watch, max_num_seqs=shape.batch).rows == expected for watch in watches]
    return [watch.decoding(shape.batch) for watch in watches], all(same)


def _milliseconds(runs: Sequence[Sequence[Step]]) -> float:
    """The median step of all."""
    return 1e3 * statistics.median(step.seconds for steps in runs for step in steps)


def _stub(shape: Shape) -> LlamaForCausalLM:
    """A model that is quick, and still one of transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=shape.prompt + shape.own + shape.new,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()
