"""Weights counted from a config, against the models themselves, built on the meta device."""

from __future__ import annotations

import contextlib
import json
import os

import family_models
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hfpaged import model_classes
from hfpaged.planner.compared_families import COMPARED, ERRORS, NEAR, told
from hfpaged.planner.model_reading import facts_of
from hfpaged.planner.parameters import count

LLAMA = {"model_type": "llama", "num_attention_heads": 32, "tie_word_embeddings": False}
# As their makers publish them: the config, and the number of weights in thousand millions.
KNOWN = {
    "Llama-2-7B": (
        LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000},
        6.738,
    ),
    "Llama-3-8B": (
        LLAMA
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
        8.030,
    ),
    "Mistral-7B": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False},
        7.242,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8}
        | {"tie_word_embeddings": False},
        46.70,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
        7.616,
    ),
    "Gemma-2-9B": (
        {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000},
        9.24,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256}
        | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"tie_word_embeddings": False},
        671,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
        | {"num_local_experts": 32, "tie_word_embeddings": False},
        20.9,
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
        | {"num_experts": 128, "moe_intermediate_size": 768, "tie_word_embeddings": False},
        30.5,
    ),
    "GPT-2": ({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}, 0.124),
}


def on_meta_device(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_are_counted_to_three_parts_in_a_thousand(name):
    config, published = KNOWN[name]
    counted = count(facts_of({"vocab_size": 50257} | config, name)).total
    assert counted == pytest.approx(on_meta_device(config).num_parameters(), rel=0.003)
    assert counted == pytest.approx(published * 1e9, rel=0.006)


def test_tied_embeddings_are_counted_once():
    config = KNOWN["Llama-3-8B"][0]
    tied = config | {"tie_word_embeddings": True}
    once, twice = count(facts_of(tied, "tied")), count(facts_of(config, "untied"))
    assert twice.total - once.total == twice.head == 128256 * 4096
    assert once.total == on_meta_device(tied).num_parameters()


def of_default(model_type):
    """Counted, and as the model on the meta device has it."""
    config = CONFIG_MAPPING[model_type]()
    without_timm = family_models._without_timm() if model_type == "gemma3n" else contextlib.nullcontext()
    with torch.device("meta"), without_timm:
        model = model_classes.build(config, model_classes.model_class_of(config))
    values = json.loads(config.to_json_string(use_diff=False))
    return count(facts_of(values, model_type)).total, model.num_parameters()


# Their classes have changed between the transformers that were compared and older ones.
CHANGED = {"idefics3", "longcat_flash", "smolvlm"}
IS_COMPARED = transformers.__version__ == COMPARED


def some(families):
    """Every third one of those that this transformers has, as all take a minute; HFPAGED_ALL_FAMILIES=1 takes all."""
    known = sorted(set(families) & set(CONFIG_MAPPING) - (set() if IS_COMPARED else CHANGED))
    return known if os.environ.get("HFPAGED_ALL_FAMILIES") else known[::3]


@pytest.mark.parametrize("model_type", some(NEAR))
def test_families_called_near_are_within_one_part_in_a_hundred(model_type):
    counted, real = of_default(model_type)
    assert counted == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("model_type", some(ERRORS))
def test_families_further_away_are_as_far_as_plan_says(model_type):
    counted, real = of_default(model_type)
    assert 100 * (counted / real - 1) == pytest.approx(ERRORS[model_type], abs=0.1)


def test_a_plan_says_how_near_its_count_is():
    assert told("llama") == "counted from the config"
    assert told("mllama") == "estimated from the config: for this type, 5.8 % more than there is was seen"
    assert told("new") == "estimated from the config: no model of this type was compared"
