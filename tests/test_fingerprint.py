"""The look at a model's weights that comes before its fingerprint."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import shared
from torch import nn

from hfpaged.fingerprint import _tensors, model_fingerprint, weights_of


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


@pytest.mark.parametrize("make", [Odd, lambda: shared("gpt2"), lambda: shared("gpt_oss")])
def test_all_parameters_and_buffers_are_looked_at(make):
    model = make()
    assert {id(t) for t in _tensors(model)} == {id(t) for t in (*model.parameters(), *model.buffers())}


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
