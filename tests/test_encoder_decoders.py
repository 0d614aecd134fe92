"""Encoder-decoders: self-attention in a PagedCache, cross-attention in a DynamicCache, the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_configs import VOCAB, tiny_config
from tiny_models import with_large_weights
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, set_seed

import hfpaged
from hfpaged import attention, compat, model_classes
from hfpaged.errors import UnsupportedModelError
from hfpaged.verdict import examine

CACHE = compat.cache_argument()
# What transformers' own dense view is for: T5 adds a position bias to the scores.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "t5": ({"num_decoder_layers": 2, "decoder_start_token_id": 0}, False),
    "bart": ({}, True),
    "whisper": ({"num_mel_bins": 8, "max_source_positions": 10, "begin_suppress_tokens": None}, True),
}
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def build(name: str) -> PreTrainedModel:
    sizes = MODELS[name][0] | {"is_encoder_decoder": True, "is_decoder": False}
    config = tiny_config(name, sizes)
    model_class = model_classes.model_class_of(config)
    assert model_class is not None
    torch.manual_seed(0)
    model = with_large_weights(model_classes.build(config, model_class))
    model.generation_config.update(suppress_tokens=None, begin_suppress_tokens=None, forced_eos_token_id=None)
    return model


def generate(model: PreTrainedModel, mode: str, cache: Any = None) -> Any:
    generator = torch.Generator().manual_seed(5)
    given: dict[str, Any] = {}
    if model.main_input_name == "input_features":
        given["input_features"] = torch.randn(2, 8, 20, generator=generator)
    else:
        given["input_ids"] = torch.randint(3, VOCAB, (2, 9), generator=generator)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, 6:] = 0
    given |= MODES[mode] | ({} if cache is None else {CACHE: cache})
    set_seed(7)
    return model.generate(**given, max_new_tokens=8, return_dict_in_generate=True, output_logits=True)


def wrapped(config: Any) -> EncoderDecoderCache:
    config = config.get_text_config(decoder=True)
    return EncoderDecoderCache(hfpaged.PagedCache(config=config), DynamicCache(config=config))


@pytest.mark.parametrize("is_patched", [False, True], ids=["unpatched", "patched"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_cache_gives_the_tokens_of_the_models_own(name, mode, is_patched):
    model = build(name)
    wanted = generate(model, mode)
    cache = wrapped(model.config)
    attention.dense_calls.clear()
    if is_patched:
        hfpaged.patch(model)
    output = generate(model, mode, cache)
    assert output.sequences.tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(wanted.logits), atol=1e-4, rtol=1e-4)
    pool = cache.self_attention_cache.pool
    pool.check_integrity()
    assert pool.num_free < pool.num_blocks
    if is_patched:
        assert bool(attention.dense_calls) != MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_support_tells_to_wrap_and_how_fast_it_is(name):
    verdict = examine(build(name).config)
    assert verdict.works
    assert (verdict.outcome == "fast") == MODELS[name][1], verdict
    assert "EncoderDecoderCache" in verdict.remedy


@pytest.mark.parametrize("name", MODELS)
def test_a_bare_cache_is_refused(name):
    model = build(name)
    with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"):
        generate(model, "greedy", hfpaged.PagedCache(config=model.config.get_text_config(decoder=True)))
