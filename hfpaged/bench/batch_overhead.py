"""Rows overhead and overhead-256: what scheduling and bookkeeping take of a step in which all requests decode."""

from __future__ import annotations

import statistics
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


def share(setting: Setting, shape: Shape) -> Measured:
    """The value is their part of the median step."""
    steps, same = _steps(setting, shape)
    part = statistics.median(step.bookkeeping / step.seconds for step in steps)
    whole = 1e3 * statistics.median(step.seconds for step in steps)
    return Measured(part, same_tokens=same, note=f"{part * whole:.2f} of {whole:.1f} ms; {len(steps)} steps")


def milliseconds(setting: Setting, shape: Shape) -> Measured:
    """The value is the milliseconds that they take, whatever the model: it is a stub of one small layer."""
    steps, same = _steps(replace(setting, model=_stub(shape), tokenizer=None), shape)
    value = 1e3 * statistics.median(step.bookkeeping for step in steps)
    whole = 1e3 * statistics.median(step.seconds for step in steps)
    return Measured(value, same_tokens=same, note=f"of {whole:.1f} ms with the stub; {len(steps)} steps")


def _steps(setting: Setting, shape: Shape) -> tuple[list[Step], bool]:
    """The steps in which all decode, and whether the tokens are those of generate()."""
    workload = alike(setting, shape)
    watch = Steps()
    pool = 2 * shape.batch * (shape.prompt + shape.own + shape.new)
    run = batched(setting, workload, pool, watch, max_num_seqs=shape.batch)
    return watch.decoding(shape.batch), run.rows == static(setting, workload, shape.batch).rows


def _stub(shape: Shape) -> LlamaForCausalLM:
    """A model that is quick, and still one of transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=shape.prompt + shape.own + shape.new,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()
