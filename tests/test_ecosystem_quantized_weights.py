"""Models whose weights are quantized: the cache holds what their layers compute, as it does for any other model."""

from __future__ import annotations

import functools
import tempfile

import pytest
import tiny_models
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, TorchAoConfig

import hfpaged
from hfpaged import attention, compat

CACHE = compat.cache_argument()
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 128}  # whole groups of weights
WHOLE, RAGGED = [13, 13], [9, 4, 22]


def plain():
    return tiny_models.make("llama", **SIZES)


def loaded(quantization, **settings):
    """As a user gets it: saved, and quantized while from_pretrained() reads it."""
    with tempfile.TemporaryDirectory() as folder:
        plain().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, device_map="cpu", **settings
        )
    model.generation_config.eos_token_id = None
    return model.eval()


def torchao(name, through_transformers):
    library = pytest.importorskip("torchao.quantization", reason="torchao cannot be imported")
    config = getattr(library, name)()
    if through_transformers:
        return loaded(TorchAoConfig(config))
    model = plain()
    library.quantize_(model, config)
    return model


def bitsandbytes(**settings):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes cannot be imported")
    return loaded(BitsAndBytesConfig(**settings), dtype=torch.float32)


def torch_dynamic():
    return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}, dtype=torch.qint8)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
WEIGHTS_ONLY = {
    "torchao_int8": functools.partial(torchao, "Int8WeightOnlyConfig", False),
    "torchao_int8_from_pretrained": functools.partial(torchao, "Int8WeightOnlyConfig", True),
    "torchao_fp8": functools.partial(torchao, "Float8WeightOnlyConfig", False),
    "bitsandbytes_nf4": functools.partial(bitsandbytes, **NF4),
}
# Activations are rounded too, so that the last bit of a number decides on a whole step of the int8: transformers' sdpa
# and eager attention do not give the same tokens there either, and no two attentions can.
ACTIVATIONS_TOO = {
    "torch_dynamic_int8": torch_dynamic,
    "torchao_int8_activations": functools.partial(torchao, "Int8DynamicActivationInt8WeightConfig", False),
    "bitsandbytes_int8": functools.partial(bitsandbytes, load_in_8bit=True),
}
KINDS = WEIGHTS_ONLY | ACTIVATIONS_TOO
WAYS = pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
PADDINGS = pytest.mark.parametrize("lengths", [WHOLE, RAGGED], ids=["whole", "left_padded"])


@functools.cache
def quantized(kind):
    return KINDS[kind]()


def generate(model, cache, lengths, **arguments):
    inputs = tiny_models.prompts(lengths)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, **{CACHE: cache}, **arguments).tolist()


def stepwise(model, cache):
    """The logits of a prompt and of six steps on tokens that do not depend on them."""
    inputs = tiny_models.prompts(WHOLE)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    steps = []
    with torch.no_grad():
        for step in range(7):
            steps.append(model(input_ids=ids, attention_mask=mask, **{CACHE: cache}).logits[:, -1])
            ids, mask = torch.full((len(ids), 1), 7 + step), torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(steps)


@WAYS
@PADDINGS
@pytest.mark.parametrize("kind", WEIGHTS_ONLY)
def test_a_model_of_quantized_weights_generates_what_it_did(kind, lengths, way):
    model = quantized(kind)
    wanted = generate(model, DynamicCache(config=model.config), lengths, **way)
    unpatched = hfpaged.PagedCache(config=model.config, num_blocks=99)
    assert generate(model, unpatched, lengths, **way) == wanted
    before = dict(attention.dense_calls)
    with hfpaged.patched(model):
        cache = hfpaged.PagedCache(model, num_blocks=99)
        assert generate(model, cache, lengths, **way) == wanted
    assert attention.dense_calls == before  # all by our kernels
    cache.pool.check_integrity()


@WAYS
@pytest.mark.parametrize("kind", ACTIVATIONS_TOO)
def test_a_model_of_quantized_activations_under_its_own_attention_generates_what_it_did(kind, way):
    model = quantized(kind)
    wanted = generate(model, DynamicCache(config=model.config), WHOLE, **way)
    assert generate(model, hfpaged.PagedCache(config=model.config, num_blocks=99), WHOLE, **way) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_is_nearer_to_the_unpatched_one_than_that_is_to_the_model_before_it_was_quantized(kind):
    model = quantized(kind)
    own, before = (stepwise(each, DynamicCache(config=each.config)) for each in (model, plain()))
    with hfpaged.patched(model):
        ours = stepwise(model, hfpaged.PagedCache(model, num_blocks=99))
    quantization = (own - before).abs().mean()
    assert quantization > 1e-3
    assert (ours - own).abs().mean() < (quantization / 4 if kind in ACTIVATIONS_TOO else 1e-5)


def test_an_adapter_on_quantized_weights():
    model = KINDS["bitsandbytes_nf4"]()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM)
    adapted = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.5, generator=generator)
    wanted = generate(adapted, DynamicCache(config=adapted.config), RAGGED)
    assert generate(adapted, hfpaged.PagedCache(adapted, num_blocks=99), RAGGED) == wanted
    with adapted.disable_adapter():
        base = generate(adapted, DynamicCache(config=adapted.config), RAGGED)
        assert generate(adapted, hfpaged.PagedCache(adapted, num_blocks=99), RAGGED) == base != wanted
