from __future__ import annotations

import pytest
import torch
from hfpaged_kernels import encoding

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import FORMATS, KVFormat, block_shape, check_dims, check_layers, resolve_format, storage_dtype

NATIVE = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def test_each_format_is_known_by_its_own_name():
    assert set(FORMATS) == {*NATIVE, "int8", "fp8_e4m3", "fp8_e5m2", "k8v4", "int4"}
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert resolve_format(name) is fmt


def test_auto_stores_what_the_model_computes():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert storage_dtype(resolve_format("auto").key, dtype) is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_named_format_converts_whatever_the_model_computes(dtype):
    fmt = resolve_format(dtype)
    for part in (fmt.key, fmt.value):
        for computed in (torch.float32, torch.bfloat16, torch.float16):
            assert storage_dtype(part, computed) is dtype


def test_a_dtype_its_name_and_its_full_name_are_one_format():
    assert resolve_format(torch.bfloat16) is resolve_format("bfloat16") is resolve_format("torch.bfloat16")


def test_torch_and_other_engines_have_names_of_their_own_for_eight_bits():
    assert resolve_format(torch.int8) is FORMATS["int8"]
    assert resolve_format(torch.float8_e4m3fn) is resolve_format("fp8") is FORMATS["fp8_e4m3"]
    assert resolve_format(torch.float8_e5m2) is FORMATS["fp8_e5m2"]


def test_a_format_of_ones_own_passes_through():
    mine = KVFormat("mine", torch.float64, encoding.INT8)
    assert resolve_format(mine) is mine


@pytest.mark.parametrize(
    "unknown", ["int3", "fp32", "", torch.float64, torch.int16, None, "int8/", "/int8", "int8/k8v4"]
)
def test_an_unknown_format_is_named_with_all_that_exist(unknown):
    name = str(unknown).removeprefix("torch.")
    with pytest.raises(InvalidConfigError) as caught:
        resolve_format(unknown)
    assert f"kv_dtype={name!r} is not known" in str(caught.value)
    assert all(known in str(caught.value) for known in FORMATS)


def test_keys_and_values_may_have_formats_of_their_own():
    fmt = resolve_format("int8/fp8_e5m2")
    assert (fmt.key, fmt.value) == (encoding.INT8, encoding.FP8_E5M2)
    assert (resolve_format("auto/int8").key, resolve_format("bfloat16/int8").key) == (None, torch.bfloat16)
    mixed = resolve_format("int8/int4")
    assert (mixed.key, mixed.value) == (FORMATS["k8v4"].key, FORMATS["k8v4"].value)


@pytest.mark.parametrize(("name", "has"), [("auto", False), ("int8", False), ("fp8_e4m3", False), ("k8v4", True),
                                           ("int4", True), ("auto/int4", True), ("int4/auto", True)])  # fmt: skip
def test_formats_of_four_bits_have_residuals(name, has):
    assert resolve_format(name).has_residuals is has


def test_a_layer_may_be_exempt():
    fmt = resolve_format({"default": "int8", "layers": {3: "auto", "0": torch.bfloat16, 5: "int8"}})
    assert fmt.title == "int8, layer 0 bfloat16, layer 3 auto"
    assert [fmt.of_layer(layer) for layer in range(6)] == [
        FORMATS[name] for name in ("bfloat16", "int8", "int8", "auto", "int8", "int8")
    ]
    assert fmt != FORMATS["int8"]
    assert resolve_format({"layers": {}}) == FORMATS["auto"]
    assert set(fmt.all) == {FORMATS["int8"], FORMATS["bfloat16"], FORMATS["auto"]}


BAD = [
    {"layer": {0: "auto"}},
    {"layers": ["auto"]},
    {"layers": {-1: "auto"}},
    {"layers": {"x": "auto"}},
    {"layers": {True: "auto"}},
    {"layers": {0: "int3"}},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_mapping_that_cannot_be_understood_is_refused(bad):
    with pytest.raises(InvalidConfigError):
        resolve_format(bad)


def test_a_layer_that_is_not_there_cannot_be_exempt():
    fmt = resolve_format({"default": "int8", "layers": {7: "auto"}})
    check_layers(fmt, range(8))
    with pytest.raises(InvalidConfigError, match=r"layer 7 the format auto, and .* are 0 to 6"):
        check_layers(fmt, range(7))


def test_odd_rows_cannot_be_packed():
    check_dims(FORMATS["int8"], 65, 33)
    check_dims(FORMATS["k8v4"], 65, 64)  # the keys are whole bytes
    with pytest.raises(InvalidConfigError, match="keys of this model have head dim 65, which is odd; use int8"):
        check_dims(FORMATS["int4"], 65, 64)
    with pytest.raises(InvalidConfigError, match="values of this model have head dim 33"):
        check_dims(FORMATS["k8v4"], 64, 33)


# Of two bytes a number, for the head dim of the demo model: what the formats shall take at most, scales included.
MOST = {"int8": 0.53, "fp8_e4m3": 0.53, "fp8_e5m2": 0.53, "k8v4": 0.42, "int4": 0.31}


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_a_block_takes_no_more_than_promised(name, most):
    fmt = FORMATS[name]
    sizes = [torch.Size(block_shape(part, 3, 16, 64)).numel() for part in (fmt.key, fmt.value)]
    assert sum(sizes) / (2 * 3 * 16 * 64 * 2) <= most
