from __future__ import annotations

import pytest
import torch

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import FORMATS, KVFormat, resolve_format


def test_each_format_is_known_by_its_own_name():
    assert set(FORMATS) == {"auto", "float32", "bfloat16", "float16"}
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert resolve_format(name) is fmt


def test_auto_stores_what_the_model_computes():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert resolve_format("auto").storage_dtype(dtype) is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_named_format_converts_whatever_the_model_computes(dtype):
    fmt = resolve_format(dtype)
    assert fmt.dtype is dtype
    for computed in (torch.float32, torch.bfloat16, torch.float16):
        assert fmt.storage_dtype(computed) is dtype


def test_a_dtype_its_name_and_its_full_name_are_one_format():
    assert resolve_format(torch.bfloat16) is resolve_format("bfloat16") is resolve_format("torch.bfloat16")


def test_a_format_of_ones_own_passes_through():
    mine = KVFormat("mine", torch.float64)
    assert resolve_format(mine) is mine


@pytest.mark.parametrize("unknown", ["int3", "fp32", "", torch.float64, torch.int8, None])
def test_an_unknown_format_is_named_with_all_that_exist(unknown):
    name = str(unknown).removeprefix("torch.")
    with pytest.raises(InvalidConfigError) as caught:
        resolve_format(unknown)
    assert f"kv_dtype={name!r} is not known" in str(caught.value)
    assert all(known in str(caught.value) for known in FORMATS)
