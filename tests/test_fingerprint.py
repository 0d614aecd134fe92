from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import nn

import hfpaged
from hfpaged.fingerprint import _modules, _tensors, model_fingerprint, weights_of


def fingerprint(model):
    return model_fingerprint(model, model.config.to_dict())


@pytest.fixture
def model():
    return tiny_models.make("llama")


def test_equal_models_have_equal_fingerprints_patched_or_not(model):
    before = fingerprint(model)
    assert len(before) == 64
    assert fingerprint(model) == fingerprint(copy.deepcopy(model)) == fingerprint(tiny_models.make("llama")) == before
    with hfpaged.patched(model):
        assert fingerprint(model) == before
    assert fingerprint(tiny_models.make("qwen2")) != before


def test_a_model_that_was_saved_is_the_same_still(model, tmp_path):
    before = fingerprint(model)
    model.save_pretrained(tmp_path)  # its config says its class from now on
    assert fingerprint(model) == fingerprint(type(model).from_pretrained(tmp_path)) == before


def test_another_process_sees_the_same():
    code = "import tiny_models as t; from hfpaged.fingerprint import model_fingerprint as f; m = t.make('llama');"
    code += "print(f(m, m.config.to_dict()))"
    paths = [str(Path(__file__).parent), *sys.path]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split()[-1] == fingerprint(tiny_models.make("llama"))


def train(model):
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    model.requires_grad_(False)


def merge(model):
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.q_proj.weight
        weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def edit_data(model):
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.01)


def replace_data(model):
    weight = model.lm_head.weight
    weight.data = weight.data * 2


def replace_parameter(model):
    model.model.norm.weight = nn.Parameter(torch.full((48,), 1.5))


def edit_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def add_buffer(model):
    model.register_buffer("extra", torch.zeros(3))


def edit_config(model):
    model.config.rms_norm_eps = 0.1


def change_dtype(model):
    model.to(torch.bfloat16)


CHANGES = [train, merge, edit_data, replace_data, replace_parameter, edit_buffer, add_buffer, edit_config, change_dtype]


@pytest.mark.parametrize("change", CHANGES, ids=lambda function: function.__name__)
def test_a_model_that_is_changed_in_place_is_another_one(model, change):
    before = fingerprint(model)
    change(model)
    after = fingerprint(model)
    assert after != before
    assert fingerprint(model) == after


def test_other_code_over_the_same_weights_is_another_model(model):
    class Scaled(type(model.model.layers[0].self_attn)):
        pass

    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.__class__ = Scaled
    assert fingerprint(other) != fingerprint(model)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_weights_that_do_not_lie_in_a_row_are_seen_to_change(model, layout):
    weight = model.lm_head.weight.data
    model.lm_head.weight.data = {
        "transposed": lambda: weight.t().contiguous().t(),
        "sliced": lambda: torch.cat([weight, weight], dim=1)[:, :48],
        "expanded": lambda: weight[:1].expand(*weight.shape),
    }[layout]()
    before = fingerprint(model)
    (model.lm_head.weight.data[:1] if layout == "expanded" else model.lm_head.weight.data).mul_(3)
    assert fingerprint(model) != before


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, torch.float16])
def test_buffers_of_any_dtype_count(model, dtype):
    model.register_buffer("one", torch.tensor(1.0).to(dtype))
    model.register_buffer("more", torch.ones(40).to(dtype))
    before = fingerprint(model)
    model.more.copy_(torch.zeros(40).to(dtype))
    assert fingerprint(model) != before
    model.register_buffer("none", torch.empty(0, dtype=dtype))
    assert len(fingerprint(model)) == 64


@pytest.mark.parametrize(("name", "value"), [("_name_or_path", "elsewhere"), ("use_cache", False)])
def test_what_says_nothing_about_the_numbers_does_not_count(model, name, value):
    before = fingerprint(model)
    setattr(model.config, name, value)
    assert fingerprint(model) == before


# The look at the weights that comes before


class Odd(nn.Module):
    """Tied weights, a place without a parameter, a buffer, and a child that knows its parent."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.first.parent = self
        self.nothing = None
        self.register_module("empty", None)


@pytest.mark.parametrize("make", [Odd, lambda: tiny_models.shared("gpt2"), lambda: tiny_models.shared("gpt_oss")])
def test_all_parameters_and_buffers_are_looked_at(make):
    model = make()
    assert {id(t) for t in _tensors(_modules(model))} == {id(t) for t in (*model.parameters(), *model.buffers())}


def test_a_model_and_its_copy_have_one_fingerprint_and_another_model_has_another():
    model = Odd()
    assert model_fingerprint(model, {"a": 1}) == model_fingerprint(copy.deepcopy(model), {"a": 1, "dtype": "x"})
    assert model_fingerprint(model, {"a": 1}) != model_fingerprint(model, {"a": 2})
    assert model_fingerprint(model, {}) != model_fingerprint(Odd(), {})


def test_weights_that_change_in_place_or_are_replaced_are_seen():
    model = Odd()
    seen = {model_fingerprint(model, {})}
    with torch.no_grad():
        model.first.bias += 1
        seen.add(model_fingerprint(model, {}))
        model.first.bias.data = model.first.bias + 1
        seen.add(model_fingerprint(model, {}))
        model.second = nn.Linear(4, 4)
        seen.add(model_fingerprint(model, {}))
    assert len(seen) == 4


def test_devices_are_those_of_the_parameters():
    model = Odd()
    model.register_buffer("elsewhere", torch.ones(3, device="meta"))
    assert weights_of(model).devices == ("cpu",)
