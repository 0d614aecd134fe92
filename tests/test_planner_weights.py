"""Weights of a plan: what headers say, and what is counted where no files are."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import shared

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.model_reading import facts_of, read_model
from hfpaged.planner.weights import weight_bytes

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def facts(config=None, **changes):
    return facts_of((config or LLAMA_2_7B) | changes, "a model")


@pytest.fixture
def folder(tmp_path):
    """Llama-2-7B's config without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return tmp_path


def header_only(path, tensors):
    """A file of safetensors that says it holds `tensors`, name -> (dtype, shape, bytes), without their numbers."""
    entries, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_headers_tell_the_bytes_that_the_model_itself_has(tmp_path):
    model = shared("llama")
    model.save_pretrained(tmp_path)
    weights = weight_bytes(read_model(str(tmp_path)))
    assert weights.parameters == model.num_parameters()
    assert weights.bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights.source == "headers of model.safetensors"


def test_shards_are_read_by_their_index(tmp_path):
    model = shared("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    weights = weight_bytes(read_model(str(tmp_path)))
    assert len(shards) > 1
    assert weights.parameters == model.num_parameters()
    assert weights.source == f"headers of {len(shards)} safetensors files"
    (tmp_path / "model.safetensors.index.json").unlink()
    assert weight_bytes(read_model(str(tmp_path))) == weights


def test_an_index_whose_files_are_not_there_tells_their_size(folder):
    index = {"metadata": {"total_size": 13476831232}, "weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = weight_bytes(read_model(str(folder)))
    assert (weights.bytes, weights.parameters) == (13476831232, 6738415616)
    assert "1 of its 1 files are not there" in weights.source


def test_another_dtype_changes_floats_only(folder):
    tensors = {"a": ("F32", [10, 10], 400), "b": ("I32", [10, 10], 400), "c": ("F8_E4M3", [10, 10], 100)}
    header_only(folder / "model.safetensors", tensors)
    assert weight_bytes(read_model(str(folder))).bytes == 900
    assert weight_bytes(read_model(str(folder)), dtype="bf16").bytes == 700


def test_weights_quantized_on_loading_leave_embeddings_and_norms_alone(folder):
    names = {"model.embed_tokens.weight": [100, 64], "model.layers.0.mlp.up_proj.weight": [64, 64], "norm.weight": [64]}
    tensors = {name: ("BF16", shape, 2 * torch.Size(shape).numel()) for name, shape in names.items()}
    header_only(folder / "model.safetensors", tensors)
    assert weight_bytes(read_model(str(folder)), quantization="int4").bytes == 100 * 64 * 2 + 64 * 64 * 4.5 / 8 + 64 * 2


def test_pickled_weights_are_never_opened(folder):
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    weights = weight_bytes(read_model(str(folder)))
    assert (weights.bytes, weights.parameters, weights.source) == (1000, 500, "size of pytorch_model.bin")
    assert weight_bytes(read_model(str(folder)), dtype="float32").bytes == 2000


def framed(header):
    return struct.pack("<Q", len(header)) + header


GOOD = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
DAMAGE = {
    "too short": (b"abc", "a header of .* bytes in 3"),
    "a header beyond its end": (struct.pack("<Q", 10**6) + b"{}", "a header of 1000000 bytes in 10"),
    "no JSON": (framed(b"abcd"), "JSONDecodeError"),
    "a list": (framed(b"[]"), "AttributeError"),
    "no shape": (framed(b'{"a":{"dtype":"F32"}}'), "KeyError"),
    "weights cut off": (framed(GOOD) + b"1234", "4 bytes of weights, its header says 16"),
    "an unknown dtype": (framed(GOOD.replace(b"F32", b"X9")) + bytes(16), "X9"),
    "other sizes than its shapes": (framed(GOOD.replace(b"[4]", b"[5]")) + bytes(16), "'shape': .5."),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named_and_the_config_counts(folder, damage):
    content, reason = DAMAGE[damage]
    (folder / "model.safetensors").write_bytes(content)
    weights = weight_bytes(read_model(str(folder)))
    assert weights.bytes == 2 * 6738415616
    assert re.fullmatch(rf"counted from the config; model.safetensors is damaged \(.*{reason}.*\)", weights.source)


def test_a_damaged_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json is damaged" in weight_bytes(read_model(str(folder))).source


def test_adapters_and_the_second_copy_of_mistrals_folders_do_not_count(folder):
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file({"a": torch.zeros(10)}, folder / name)
    assert weight_bytes(read_model(str(folder))).source == "counted from the config"


def test_weights_beside_a_config_of_another_name_may_be_those_of_another_model(folder):
    save_file({"a": torch.zeros(10)}, folder / "model.safetensors")
    assert weight_bytes(read_model(str(folder / "config.json"))).bytes == 40
    (folder / "planned.json").write_text(json.dumps(LLAMA_2_7B))
    assert weight_bytes(read_model(str(folder / "planned.json"))).source == "counted from the config"


QUANTIZED = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
    "nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5),
    "nf4 twice": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.127),
    "8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.01),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
    "pack": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}}},
        4.5,
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_counted_with_their_scales_and_embeddings_without(name):
    config, bits = QUANTIZED[name]
    outside = 2 * 32000 * 4096 + 65 * 4096
    expected = outside * 2 + (6738415616 - outside) * bits / 8
    weights = weight_bytes(facts(quantization_config=config))
    assert weights.bytes == pytest.approx(expected, abs=1)
    assert weights.parameters == 6738415616


def test_a_second_quantization_is_refused():
    quantized = facts(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(InvalidConfigError, match=r"quantized already \(gptq of 4 bits\); leave it out"):
        weight_bytes(quantized, quantization="int8")


def test_unknown_dtypes_and_quantizations_are_refused():
    with pytest.raises(InvalidConfigError, match="dtype='int7' is none that weights have; use one of"):
        weight_bytes(facts(), dtype="int7")
    with pytest.raises(InvalidConfigError, match="quantization='int5' is unknown; use one of int8, fp8, int4"):
        weight_bytes(facts(), quantization="int5")


def test_a_known_answer_by_dtype_and_quantization():
    assert weight_bytes(facts()).bytes == 13_476_831_232
    assert weight_bytes(facts(), dtype="float32").bytes == 26_953_662_464
    assert weight_bytes(facts(), quantization="int8").bytes == pytest.approx(7.01e9, rel=0.01)


def test_gpt_oss_with_experts_of_four_bits_takes_what_its_files_do():
    config = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
    config |= {"num_local_experts": 32, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    assert weight_bytes(facts_of(config, "gpt-oss-20b")).bytes == pytest.approx(13.76e9, rel=0.005)
