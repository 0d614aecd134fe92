"""What a batch of requests gets is what model.generate() gives each prompt alone, token for token."""

from __future__ import annotations

import functools

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfpaged
from hfpaged import ContinuousBatcher, RequestTooLongError

LENGTHS = (4, 21, 1, 40, 13, 33)
NEW = 12
# Models that the engine computes one sequence at a time: attention code of their own, or expanded latent keys.
ONE_BY_ONE = (*tiny_models.OWN_ATTENTION, *tiny_models.LATENT)


def prompts(lengths=LENGTHS, seed=0):
    rows = tiny_models.prompts(list(lengths), seed)["input_ids"]
    return [row[len(row) - length :].tolist() for row, length in zip(rows, lengths, strict=True)]


def alone(model, prompt, **arguments):
    """The new tokens of each returned sequence."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), **{"max_new_tokens": NEW, "do_sample": False} | arguments
    )
    return out[:, len(prompt) :].tolist()


@functools.cache
def greedy(name):
    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    return [alone(model, prompt)[0] for prompt in prompts()]


def batcher_of(name, **sizes):
    return ContinuousBatcher(tiny_models.shared(name), prepack=False, **{"num_blocks": 200} | sizes)


def checked(batcher):
    """All is given back."""
    batcher.pool.check_integrity()
    assert batcher.pool.num_free == batcher.pool.num_blocks
    batcher.close()
    hfpaged.unpatch(batcher.model)


SIZES = {
    "at once": {},
    "in chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "in small blocks": {"block_size": 2, "num_blocks": 900},
    "few at once": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
    "preempted": {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "nothing shared": {"prefix_sharing": False},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", tiny_models.TABLE)
def test_greedy_tokens_are_those_of_generate_alone(name, sizes):
    if sizes.get("num_blocks") == 24 and name in ("mistral", "gemma2", "gpt_oss"):
        sizes = sizes | {"num_blocks": 60}  # tables for several layer groups
    events = []
    expected = greedy(name)
    batcher = batcher_of(name, hooks=(events.append,), **sizes)
    outputs = batcher.generate(prompts(), max_new_tokens=NEW, do_sample=False)
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"length"}
    again = batcher.generate(prompts(), max_new_tokens=NEW, do_sample=False)  # now with known prefixes
    assert [output.token_ids for output in again] == expected
    assert batcher.describe()["forward"].startswith("one by one" if name in ONE_BY_ONE else "packed")
    if sizes.get("num_blocks") == 24:
        assert any(type(event).__name__ == "Preempted" for event in events)
    checked(batcher)


MODES = {
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.6},
    "n-grams": {"no_repeat_ngram_size": 2},
    "ends": {"eos_token_id": list(range(3, 25))},
    "min": {"eos_token_id": list(range(3, 45)), "min_new_tokens": 5},
    "bias": {"sequence_bias": [[[5], 30.0], [[5, 6], -60.0]]},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "bloom"])
def test_settings_are_those_of_generate(name, mode):
    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    expected = [alone(model, prompt, **mode) for prompt in prompts()]
    batcher = batcher_of(name, block_size=4, num_blocks=600, max_num_batched_tokens=64, max_num_seqs=32)
    outputs = batcher.generate(prompts(), max_new_tokens=NEW, **{"do_sample": False} | mode)
    assert [[without_padding(s.token_ids) for s in o.sequences] for o in outputs] == [
        [without_padding(row) for row in rows] for rows in expected
    ]
    checked(batcher)


def without_padding(row):
    while row and row[-1] == 0:
        row = row[:-1]
    return row


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "k8v4", "int4"])
def test_tokens_of_quantized_pools_do_not_depend_on_the_company(kv_dtype):
    batcher = batcher_of("llama", kv_dtype=kv_dtype, prefix_sharing=False)
    together = batcher.generate(prompts(), max_new_tokens=NEW, do_sample=False)
    apart = [batcher.generate(prompt, max_new_tokens=NEW, do_sample=False)[0] for prompt in prompts()]
    assert [output.token_ids for output in together] == [output.token_ids for output in apart]
    checked(batcher)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
def test_guesses_change_no_token(name):
    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    repeating = [prompt * 3 for prompt in prompts((4, 9, 13))]
    expected = [alone(model, prompt, max_new_tokens=30)[0] for prompt in repeating]
    batcher = batcher_of(name, block_size=4, num_blocks=900)
    outputs = batcher.generate(repeating, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=4)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.draft_tokens for output in outputs) > 0
    sampled = {"max_new_tokens": 30, "do_sample": True, "seed": 5, "temperature": 0.7}
    plain = batcher.generate(repeating, **sampled)
    guessed = batcher.generate(repeating, prompt_lookup_num_tokens=4, **sampled)
    assert [output.token_ids for output in plain] == [output.token_ids for output in guessed]
    checked(batcher)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=10),
    budget=st.integers(10, 80),
    blocks=st.integers(20, 80),
    seed=st.integers(0, 99),
)
def test_any_company_gives_the_same_tokens(lengths, budget, blocks, seed):
    model = tiny_models.shared("llama")
    hfpaged.unpatch(model)
    given_prompts = prompts(lengths, seed)
    expected = [alone(model, prompt)[0] for prompt in given_prompts]
    batcher = batcher_of("llama", block_size=4, num_blocks=blocks, max_num_seqs=10, max_num_batched_tokens=budget)
    outputs = batcher.generate(given_prompts, max_new_tokens=NEW, do_sample=False)
    assert [output.token_ids for output in outputs] == expected
    checked(batcher)


def test_a_seed_gives_what_it_gives_to_generate_in_any_company():
    model = tiny_models.shared("llama")
    hfpaged.unpatch(model)
    sampled = {"do_sample": True, "temperature": 1.3, "top_k": 30}
    expected = []
    for seed, prompt in enumerate(prompts()):
        torch.manual_seed(seed)
        expected.append(alone(model, prompt, **sampled)[0])
    batcher = batcher_of("llama")
    configs = [sampled | {"seed": seed, "max_new_tokens": NEW} for seed in range(len(LENGTHS))]
    together = batcher.generate(prompts(), configs)
    assert [output.token_ids for output in together] == expected
    many = batcher.generate(prompts(), [config | {"n": 3} for config in configs])
    assert [output.sequences[0].token_ids for output in many] == expected
    assert all(len({tuple(seq.token_ids) for seq in output.sequences}) == 3 for output in many)
    checked(batcher)


def test_samples_share_the_blocks_of_their_prompt_and_compute_it_once():
    batcher = batcher_of("llama", block_size=4)
    (prompt,) = prompts((40,))
    output = batcher.generate(prompt, max_new_tokens=4, do_sample=True, n=5)[0]
    assert output.metrics.computed_tokens == 40 + 5 * 3
    assert output.metrics.peak_blocks == 10 + 5
    checked(batcher)


def test_who_has_his_prompt_computed_anyway_does_not_wait_for_the_same_one():
    batcher = batcher_of("llama", block_size=4, max_num_batched_tokens=16, max_num_seqs=8, max_step_stretch=None)
    (common,) = prompts((40,))
    events = []
    batcher.hooks.append(events.append)
    outputs = batcher.generate([common, common], [{"max_new_tokens": 1}, {"max_new_tokens": 1, "prompt_logprobs": 0}])
    kinds = [type(event).__name__ for event in events]
    assert kinds.index("Finished") > [i for i, kind in enumerate(kinds) if kind == "Admitted"][1]
    assert outputs[1].num_cached_tokens == 0
    assert None not in outputs[1].prompt_logprobs[1:]
    checked(batcher)


def test_a_prefix_that_another_request_computes_is_waited_for():
    batcher = batcher_of("llama", block_size=4, max_num_batched_tokens=16, max_num_seqs=8)
    (common,) = prompts((40,))
    outputs = batcher.generate([[*common, 5], [*common, 6], [*common, 7]], max_new_tokens=3, do_sample=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 40, 40]
    assert sum(output.metrics.computed_tokens for output in outputs) == 41 + 1 + 1 + 3 * 2
    checked(batcher)


def test_prompts_whose_length_changes_all_positions_are_not_cut():
    half = 6
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * half, "long_factor": [4.0] * half, "factor": 8.0,
    }  # fmt: skip
    model = tiny_models.make(
        "phi3", rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=256
    )
    given_prompts = prompts((20, 50, 90, 33))
    expected = [alone(model, prompt)[0] for prompt in given_prompts]
    batcher = ContinuousBatcher(model, num_blocks=200, max_num_batched_tokens=16, max_num_seqs=8, prepack=False)
    assert batcher.describe()["prompts"] == "whole"
    with pytest.raises(RequestTooLongError, match="across 32"):
        batcher.generate(prompts((25,)), max_new_tokens=NEW)
    for _ in range(2):
        outputs = batcher.generate(given_prompts, max_new_tokens=NEW, do_sample=False)
        assert [output.token_ids for output in outputs] == expected
    checked(batcher)
