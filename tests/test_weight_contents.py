"""What is in a model's weights: one number that changes is enough, and nothing that has not changed is read again."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from torch import nn

import hfpaged
from hfpaged import weight_contents
from hfpaged.fingerprint import model_fingerprint
from hfpaged.weight_contents import WeightContents


def digest(*tensors):
    return WeightContents().digest(tensors, [tensor.data_ptr() for tensor in tensors])


def fingerprint(model):
    return model_fingerprint(model, model.config.to_dict())


@pytest.fixture
def read(monkeypatch):
    """The shapes of what is read, in order."""
    seen = []
    whole = weight_contents._contents
    monkeypatch.setattr(weight_contents, "_contents", lambda tensor: seen.append(tuple(tensor.shape)) or whole(tensor))
    return seen


@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 8191, 8192, 20000, 20002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool], ids=str)
def test_one_number_among_many_is_enough(dtype, place):
    numbers = torch.zeros(20003).to(dtype)
    before = digest(numbers)
    numbers[place] = 1
    assert digest(numbers) != before


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_signs_that_turn_together_do_not_cancel_each_other(dtype, step):
    numbers = torch.ones(2**16).to(dtype)
    seen = {digest(numbers)}
    for first in range(step):
        turned = numbers.clone()
        turned[first::step] *= -1
        seen.add(digest(turned))
    assert len(seen) == 1 + step


def test_numbers_that_change_places_are_other_ones():
    numbers = torch.arange(2**14, dtype=torch.float32)
    swapped = numbers.clone()
    swapped[[2, 4]] = numbers[[4, 2]]
    assert len({digest(numbers), digest(swapped), digest(numbers.flip(0)), digest(numbers.view(2, -1))}) == 4


def test_where_and_how_numbers_lie_does_not_count():
    numbers = torch.arange(10000, dtype=torch.float32).view(100, 100)
    beside = torch.cat([torch.zeros(1), numbers.flatten()])[1:].view(100, 100)
    turned = numbers.t().contiguous().t()
    with torch.inference_mode():
        inside = numbers.clone()
    assert {digest(each) for each in (numbers, beside, turned, inside)} == {digest(numbers)}


def test_only_what_has_changed_is_read_again(read):
    model = tiny_models.make("llama")
    before = fingerprint(model)
    assert len(read) > 10
    del read[:]
    assert fingerprint(model) == before
    assert read == []
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 7] += 1
    after = fingerprint(model)
    assert after != before
    assert read == [tuple(model.model.layers[1].mlp.up_proj.weight.shape)]
    model.register_buffer("more", torch.zeros(3))
    assert fingerprint(model) not in (before, after)
    assert read[1:] == [(3,)]


def test_a_batcher_has_read_all_before_its_first_request(read):
    batcher = hfpaged.ContinuousBatcher(tiny_models.make("llama"), num_blocks=64)
    assert len(read) > 10
    del read[:]
    batcher.generate([[5, 6, 7]], max_new_tokens=2)
    assert read == []


def test_tied_weights_are_read_once(read):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model_fingerprint(model, {})
    assert read == [(4, 4)]


def test_tensors_that_do_not_say_where_they_lie_are_all_read(monkeypatch):
    model = tiny_models.make("llama")
    before = fingerprint(model)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    assert fingerprint(copy.deepcopy(model)) == before


def test_weights_in_onednns_order_count_as_the_plain_ones():
    model = tiny_models.make("llama")
    before = fingerprint(model)
    hfpaged.patch(model, prepack=True)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5, 7] += 1
    changed = fingerprint(model)
    hfpaged.unpatch(model)
    assert fingerprint(model) == changed != before
