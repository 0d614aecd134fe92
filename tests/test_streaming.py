"""PagedCache(model, window=, sinks=): what StreamingLLM says, held against an own writing-down of its rule."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from streaming import CACHE, as_in_the_paper, paper_cache, paper_logits
from transformers import DynamicCache

import hfpaged
from hfpaged import attention


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices of 48 columns are done before a second thread has woken up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_dense_view():
    before = dict(attention.dense_calls)
    yield
    assert attention.dense_calls == before


def streaming(model, window=32, sinks=4, block_size=16, num_blocks=500, **arguments):
    return hfpaged.PagedCache(
        model, window=window, sinks=sinks, block_size=block_size, num_blocks=num_blocks, **arguments
    )


def generate(model, cache, inputs, new, **arguments):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **{CACHE: cache}, **arguments)


@torch.no_grad()
def forward(model, cache, ids, **arguments):
    return model(ids, **{CACHE: cache}, **arguments).logits


def random_ids(batch, length, seed=0):
    return tiny_models.prompts([length] * batch, seed)["input_ids"]


def pieces_of(prompt, window, sinks, block_size):
    """In what pieces a prompt is computed: what is seen whole, then a quarter of the window in blocks."""
    whole = window + -(-sinks // block_size) * block_size
    chunk = max(window // 4 // block_size, 1) * block_size
    pieces = [min(prompt, whole)]
    while sum(pieces) < prompt:
        pieces.append(min(chunk, prompt - sum(pieces)))
    return pieces


# Model, its own changes, window, sinks, block_size.
PAPER_CASES = {
    "llama": ("llama", {}, 32, 4, 16),
    "qwen3": ("qwen3", {}, 32, 4, 16),
    "gemma2_own_windows_beside": ("gemma2", {}, 32, 4, 16),
    "gpt_oss_learnt_sinks_beside": ("gpt_oss", {}, 32, 4, 16),
    "gpt_neox_rotates_a_part": ("gpt_neox", {}, 32, 4, 16),
    "mistral_window_above_ours": ("mistral", {"sliding_window": 100}, 24, 4, 4),
    "two_blocks_of_sinks": ("llama", {}, 24, 6, 4),
    "no_sinks": ("llama", {}, 32, 0, 16),
    "window_within_a_block": ("llama", {}, 5, 3, 16),
    "one_token": ("llama", {}, 1, 1, 1),
    "window_of_no_power": ("qwen3", {}, 37, 9, 8),
}


@pytest.mark.parametrize(("prompt", "new"), [(1, 100), (40, 310), (150, 60)])
@pytest.mark.parametrize("case", PAPER_CASES)
def test_a_long_text_gives_the_tokens_and_logits_of_the_paper(case, prompt, new, monkeypatch):
    name, changes, window, sinks, block_size = PAPER_CASES[case]
    model, ids = tiny_models.make(name, **changes), random_ids(1, prompt)
    cache = streaming(model, window, sinks, block_size)
    ours = generate(model, cache, {"input_ids": ids}, new, return_dict_in_generate=True, output_logits=True)
    cache.pool.check_integrity()
    reference = as_in_the_paper(tiny_models.make(name, **changes), monkeypatch, window)
    pieces = pieces_of(prompt, window, sinks, block_size)
    theirs = paper_logits(
        reference,
        paper_cache(reference, window, sinks, block_size),
        ours.sequences[:, :-1],
        [*pieces, *[1] * (new - 1)],
    )[len(pieces) - 1 :]
    torch.testing.assert_close(torch.cat(ours.logits), theirs, atol=2e-4, rtol=2e-4)
    assert ours.sequences[0, prompt:].tolist() == theirs.argmax(dim=-1).tolist()
