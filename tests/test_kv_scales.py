"""Static scales and the file that keeps them."""

from __future__ import annotations

import json

import pytest
import torch
from quality_model import small_llama
from transformers import DynamicCache

from hfpaged.errors import KVScalesError, PrefixFileError
from hfpaged.fingerprint import model_keys
from hfpaged.kv_scales import MARGIN, KVScales, LayerAmax
from hfpaged.quality.calibration import calibrate
from hfpaged.tensor_file import TensorSpec, open_file, write_file


def known(kv_format="fp8_e4m3"):
    first = LayerAmax(torch.tensor([4.0, 0.0]), torch.tensor([0.5, 1e-3]))
    return KVScales(kv_format, "f" * 64, {0: first, 3: LayerAmax(torch.tensor([7.0]), torch.tensor([8.0]))})


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "scales.safetensors"
    assert known().save(path) == path.stat().st_size
    found = KVScales.load(path)
    assert (found.kv_format, found.fingerprint, list(found.layers)) == ("fp8_e4m3", "f" * 64, [0, 3])
    for layer, amax in known().layers.items():
        assert all(torch.equal(a, b) for a, b in zip(amax, found.layers[layer], strict=True))


@pytest.mark.parametrize(("kv_format", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_the_largest_number_of_each_head_just_fits_the_format(kv_format, largest):
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_format]
    assert torch.finfo(dtype).max == largest
    key, value = known(kv_format).scales(0, margin=1.0)
    assert key.tolist() == pytest.approx([4 / largest, 1.0])
    assert (torch.tensor([0.5, 1e-3]) / value).tolist() == pytest.approx([largest, largest])
    assert key.dtype == value.dtype == torch.float32


def test_a_margin_leaves_room_for_larger_numbers():
    plain, with_room = known().scales(3, margin=1.0), known().scales(3)
    assert all(torch.allclose(b, MARGIN * a) for a, b in zip(plain, with_room, strict=True))


def test_a_layer_that_was_not_there_is_named():
    with pytest.raises(KVScalesError, match="the scales are for 2 layers, and layer 1 is none of them"):
        known().scales(1)


def test_another_model_is_refused():
    known().check_model("f" * 64)
    with pytest.raises(KVScalesError, match=r"fingerprint ffffffffffff\.\.\., this one has 000000000000\.\.\."):
        known().check_model("0" * 64)


@pytest.mark.parametrize("place", [0, 40, 200, -1], ids=["length", "digest", "header", "tensors"])
def test_a_changed_byte_is_found_wherever_it_is(tmp_path, place):
    path = tmp_path / "scales.safetensors"
    known().save(path)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.raises(KVScalesError, match="calibrate again with `hfpaged quality --calibrate`"):
        KVScales.load(path)


@pytest.mark.parametrize("kept", [0, 10, 300, -1])
def test_a_truncated_file_is_found(tmp_path, kept):
    path = tmp_path / "scales.safetensors"
    known().save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(KVScalesError, match="truncated"):
        KVScales.load(path)


def written(path, manifest=None, tensor=None, name="layer.0.key"):
    """A file that is whole and says something else than `save` would."""
    manifest = {"format": 1, "kv_format": "fp8_e4m3", "model": "f", "layers": [0]} | (manifest or {})
    tensors = {"layer.0.key": torch.ones(2), "layer.0.value": torch.ones(2)}
    if tensor is not None:
        tensors[name] = tensor
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_file(path, json.dumps(manifest), specs, tensors.values())
    return path


def test_a_whole_file_of_that_kind_loads(tmp_path):
    assert KVScales.load(written(tmp_path / "a")).layers[0].key.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"manifest": {"format": 2}}, "its format is number 2"),
        ({"manifest": {"kv_format": "int8"}}, "it is for 'int8', and static scales are for fp8_e4m3, fp8_e5m2"),
        ({"manifest": {"kv_format": ["fp8_e4m3"]}}, "cannot be understood"),
        ({"manifest": {"layers": [0, 1]}}, "layer.1.key is None and should be float32"),
        ({"manifest": {"layers": None}}, "cannot be understood"),
        ({"manifest": {"layers": ["x"]}}, "cannot be understood"),
        ({"tensor": torch.ones(2, dtype=torch.float64)}, "layer.0.key is .*F64|float64"),
        ({"tensor": torch.ones(2, 2)}, "layer.0.key is"),
        ({"tensor": torch.tensor([1.0, float("nan")])}, "layer.0.key holds numbers that are no sizes"),
        ({"tensor": torch.tensor([-1.0, 1.0])}, "layer.0.key holds numbers that are no sizes"),
        ({"tensor": torch.tensor([float("inf"), 1.0])}, "layer.0.key holds numbers that are no sizes"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path, changes, words):
    path = written(tmp_path / "scales.safetensors", **changes)
    with pytest.raises(KVScalesError, match=words):
        KVScales.load(path)


def test_scales_and_prefixes_do_not_pass_for_one_another(tmp_path):
    path = tmp_path / "scales.safetensors"
    path.write_bytes(b"something else")
    with pytest.raises(KVScalesError, match="does not begin like a file of static scales"):
        KVScales.load(path)
    with pytest.raises(PrefixFileError, match="does not begin like a file of saved prefixes"), open_file(path):
        pass
    write_file(path, json.dumps({"format": 1, "kv_format": "fp8_e4m3", "block_size": 16, "roots": []}), [], [])
    with pytest.raises(KVScalesError, match="cannot be understood"):
        KVScales.load(path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        KVScales.load(tmp_path / "none")


@pytest.mark.parametrize("window", [None, 8])
def test_calibration_sees_every_text_even_what_has_left_a_window(window):
    model = small_llama() if window is None else small_mistral(window)
    texts = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(0))
    texts = torch.cat([texts, texts[:1]])
    with torch.inference_mode():
        whole = calibrate(model, [texts], "fp8_e4m3")
        parts = calibrate(model, texts.split(2), "fp8_e4m3")
    assert list(whole.layers) == [0, 1]
    assert whole.fingerprint == model_keys(model)[0].value
    for layer, amax in whole.layers.items():
        assert amax.key.shape == amax.value.shape == (2,)
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(amax, parts.layers[layer], strict=True))
    if window is None:
        with torch.inference_mode():
            cache = model(input_ids=texts, use_cache=True).past_key_values
        assert isinstance(cache, DynamicCache)
        assert torch.allclose(whole.layers[1].key, cache.layers[1].keys.abs().amax(dim=(0, 2, 3)), rtol=1e-5)
    else:  # the first layer's keys depend on each token alone: those of a shorter text are seen as well
        with torch.inference_mode():
            shorter = calibrate(model, [texts[:, :20]], "fp8_e4m3")
        assert bool((whole.layers[0].key >= shorter.layers[0].key * (1 - 1e-5)).all())


def small_mistral(window):
    from tiny_models import PLAIN, with_large_weights
    from transformers import MistralConfig, MistralForCausalLM

    sizes = PLAIN | {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256}
    return with_large_weights(MistralForCausalLM(MistralConfig(**sizes, sliding_window=window)))
