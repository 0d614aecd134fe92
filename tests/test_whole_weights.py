"""Checkpoints that lack weights, or have others than their model has a place for: refused by name, and no other."""

from __future__ import annotations

import json

import pytest
import serve_models
import tiny_models
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForSequenceClassification, TorchAoConfig

from hfpaged import demo_model
from hfpaged.errors import CheckpointError
from hfpaged.whole_weights import load_whole


def saved(folder, name="llama", change=None, **sizes):
    """A folder with that model; `change` makes other tensors of its tensors."""
    tiny_models.make(name, **sizes).save_pretrained(folder)
    if change is not None:
        weights = folder / "model.safetensors"
        save_file(change(load_file(weights)), weights, {"format": "pt"})
    return folder


def load(folder, **arguments):
    return load_whole(folder, AutoModelForCausalLM, **arguments)


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


WHOLE = {name: {} for name in ("llama", "gpt2", "bloom", "gpt_oss", "deepseek_v3")}
TIED = {f"{name}, tied": {"tie_word_embeddings": True} for name in ("llama", "gemma2", "gpt_neox")}


@pytest.mark.parametrize(("name", "sizes"), (WHOLE | TIED).items(), ids=WHOLE | TIED)
def test_whole_checkpoints_are_loaded(name, sizes, tmp_path):
    family = name.partition(",")[0]
    loaded, wanted = load(saved(tmp_path, family, **sizes)), tiny_models.make(family, **sizes)
    for (key, found), given in zip(loaded.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(found, given), key


def test_weights_that_are_quantized_as_they_are_read_are_no_other_ones(tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao cannot be imported")
    load(saved(tmp_path), quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()), device_map="cpu")


def test_a_base_model_whose_head_is_its_embeddings_is_whole(tmp_path):
    load(saved(tmp_path, "llama", lambda all_: {key.removeprefix("model."): all_[key] for key in all_},
               tie_word_embeddings=True))  # fmt: skip


def test_layers_behind_the_last_one_are_left_alone(tmp_path):
    """Many keep there what drafts tokens."""

    def with_another(tensors):
        return tensors | {key.replace("layers.1", "layers.2"): value.clone() for key, value in tensors.items()}

    load(saved(tmp_path, "llama", with_another))


def without(part):
    return lambda tensors: {key: value for key, value in tensors.items() if part not in key}


def with_one(key, size):
    return lambda tensors: tensors | {key: torch.ones(size)}


LACKING = {
    "a layer": ("llama", without("layers.1."), r": 9 of the 21 tensors of LlamaForCausalLM .*down_proj.* and 6 more\)"),
    "experts": ("gpt_oss", without("layers.1.mlp.experts"), r": 4 of the \d+ tensors of GptOssForCausalLM "),
    "a buffer": ("deepseek_v3", without("correction_bias"), r": 1 of the .*e_score_correction_bias\)"),
    "the head": ("gpt_neox", without("embed_out"), r": 1 of the \d+ tensors .*\((lm_head|embed_out)\.weight\)"),
}


@pytest.mark.parametrize(("name", "change", "words"), LACKING.values(), ids=LACKING)
def test_what_lacks_is_counted_and_named(name, change, words, tmp_path):
    with pytest.raises(CheckpointError, match=rf"^cannot load [^\n]*{words}.*random numbers.*fetch the files again"):
        load(saved(tmp_path, name, change))


LEFT_OUT = {
    "bias": (with_one("model.layers.0.self_attn.q_proj.bias", 48), r"\(model\.layers\.0\.self_attn\.q_proj\.bias\)"),
    "norm": (with_one("model.layers.1.self_attn.q_norm.weight", 12), r"\(model\.layers\.1\.self_attn\.q_norm\.weight"),
}


@pytest.mark.parametrize(("change", "words"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_weights_of_layers_that_the_model_has_no_place_for_are_named(change, words, tmp_path):
    with pytest.raises(CheckpointError, match=rf": 1 tensors in its files are for layers of .*{words}.*model_type"):
        load(saved(tmp_path, "llama", change))


def test_old_masks_in_the_places_of_biases_are_no_weights(tmp_path):
    load(saved(tmp_path, "gpt2", with_one("transformer.h.0.attn.bias", (1, 1, 4, 4))))


def test_other_shapes_are_named_with_both_of_them(tmp_path):
    rewrite(saved(tmp_path) / "config.json", intermediate_size=96)
    with pytest.raises(CheckpointError, match=r": 6 tensors have other shapes .*down_proj\.weight is \[48, 64\], not "):
        load(tmp_path)


@pytest.mark.parametrize(("tied", "words"), [(False, "1 of the 21 tensors"), (True, "whose head gives no tokens")])
def test_a_classifier_is_told_from_a_language_model(tied, words, tmp_path):
    config = AutoConfig.for_model("llama", **tiny_models.PLAIN | {"tie_word_embeddings": tied})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{words}.*LlamaForSequenceClassification|LlamaForSeq.*{words}"):
        load(tmp_path)
    load_whole(tmp_path, LlamaForSequenceClassification)


@pytest.fixture
def adapter(tmp_path):
    model = get_peft_model(load(saved(tmp_path / "base")), LoraConfig(target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_below_an_adapter_a_layer_that_lacks_is_found_too(adapter):
    assert load(adapter).peft_config["default"].base_model_name_or_path == str(adapter.parent / "base")
    saved(adapter.parent / "base", "llama", without("layers.1."))
    with pytest.raises(CheckpointError, match=r"base': 9 of the 21 tensors"):
        load(adapter)


def test_an_adapter_of_nothing_is_told_what_it_needs(adapter):
    rewrite(adapter / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match=r"does not say of which model.*--adapter NAME=PATH"):
        load(adapter)
    rewrite(adapter / "adapter_config.json", base_model_name_or_path=str(adapter / "none"))
    with pytest.raises(CheckpointError, match=r"an adapter of '.*none', and there is no such folder.*--adapter"):
        load(adapter)


def test_programs_load_no_other_way(tmp_path):
    tokenizer = serve_models.tokenizer()
    tokenizer.save_pretrained(saved(tmp_path, "llama", without("layers.1."), vocab_size=len(tokenizer)))
    with pytest.raises(CheckpointError, match="9 of the 21 tensors"):
        demo_model.load(tmp_path)
    with pytest.raises(CheckpointError, match="9 of the 21 tensors"):
        demo_model.load_without_tokenizer(tmp_path, "float32", "cpu")
