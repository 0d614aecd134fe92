"""Quantized caches do not go astray: over many steps, and whichever way a context came into the cache."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from test_quantized_tokens import check_freed
from test_same_tokens import CACHE
from transformers import DynamicCache

import hfpaged


@pytest.fixture(scope="module")
def model():
    """Weights as a trained model has them, no larger: next tokens are close calls, and every difference counts."""
    made = tiny_models.make("llama", num_hidden_layers=4, max_position_embeddings=512)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    yield made
    hfpaged.unpatch(made)


@torch.no_grad()
def forced(model, cache, ids, first):
    """Log probabilities [rows, positions from first - 1 on, vocabulary], the first `first` tokens at once."""
    logits = [model(ids[:, :first], **{CACHE: cache}).logits[:, -1]]
    logits += [model(one, **{CACHE: cache}).logits[:, -1] for one in ids[:, first:].split(1, dim=1)]
    return torch.stack(logits, dim=1).log_softmax(-1)


def kl(native, other):
    """[rows, positions]"""
    return (native.exp() * (native - other)).sum(-1)


def paged(model, fmt):
    return hfpaged.PagedCache(model, kv_dtype=fmt, num_blocks=200)


def random_ids(rows, length):
    return torch.randint(3, tiny_models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


# Mean KL divergence from the native cache in nats: measured on this model, and three times that at most.
MEAN = {"int8": 1.8e-4, "fp8_e4m3": 4e-3, "fp8_e5m2": 1.8e-2, "k8v4": 1.7e-2, "int4": 2.7e-2}


@pytest.mark.parametrize("fmt", MEAN)
def test_three_hundred_steps_are_as_near_at_their_end_as_at_their_beginning(model, fmt):
    ids = random_ids(4, 316)
    native = forced(model, paged(model, "auto"), ids, 16)
    cache = paged(model, fmt)
    off = kl(native, forced(model, cache, ids, 16))
    early, late = off[:, 20:120].mean(), off[:, 200:].mean()
    assert off[:, 1:].max() > 0
    assert late < 1.5 * early + 1e-7
    assert max(early, late) < MEAN[fmt]
    check_freed(cache)


@pytest.mark.parametrize("fmt", MEAN)
@pytest.mark.parametrize("length", [31, 32, 47])
def test_a_context_is_the_same_by_one_prefill_and_by_decode_steps(model, fmt, length):
    """A prefill sees what the model computed, decode steps what is stored; both store nearly the same."""
    ids = random_ids(4, length + 1)
    at_once = forced(model, paged(model, fmt), ids, length)[:, -1]
    one_by_one = forced(model, paged(model, fmt), ids, 1)[:, -1]
    native = forced(model, DynamicCache(config=model.config), ids, length)[:, -1]
    assert 0 < kl(at_once, one_by_one).mean() < 3 * MEAN[fmt]
    assert kl(native, at_once).mean() < MEAN[fmt]
