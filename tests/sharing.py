"""What the tests of prefix sharing have in common: runs with and without, and what a model really computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tiny_models
import torch
from transformers import DynamicCache, set_seed

import hfpaged
from hfpaged import compat

CACHE = compat.cache_argument()
BLOCK = 8


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, tiny_models.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Left-padded prompts, as a tokenizer gives them."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def paged(model: Any, pool: Any = None, **options: Any) -> hfpaged.PagedCache:
    """A cache on `pool`, or on a pool of its own."""
    return hfpaged.PagedCache(model, pool=pool, **({} if pool else {"block_size": BLOCK, "num_blocks": 600}) | options)


def own(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def generate(model: Any, cache: Any, rows: Any, new: int = 6, **arguments: Any) -> Any:
    """`rows`: lists of tokens, or ready inputs."""
    inputs = rows if isinstance(rows, dict) else padded(*rows)
    set_seed(3)
    defaults = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": new}
    return model.generate(**inputs, **(defaults | {CACHE: cache} | arguments))


def assert_same(ours: Any, theirs: Any) -> None:
    """The same tokens, and the same logits up to rounding with the same best token."""
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.logits) == len(theirs.logits)
    for left, right in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(left, right, atol=2e-4, rtol=2e-4)
        assert left.argmax(-1).tolist() == right.argmax(-1).tolist()


def assert_generates_the_same(model: Any, cache: Any, rows: Any, new: int = 6, **arguments: Any) -> Any:
    """With `cache` as with transformers' own; the blocks are whole after it. Returns the output."""
    ours = generate(model, cache, rows, new, **arguments)
    assert_same(ours, generate(model, own(model), rows, new, **arguments))
    cache.pool.check_integrity()
    return ours


class Counted:
    """Tokens that went through the embedding of a model, padding included, forward by forward."""

    def __init__(self) -> None:
        self.forwards: list[int] = []

    @property
    def tokens(self) -> int:
        return sum(self.forwards)


@contextmanager
def counting(model: Any) -> Iterator[Counted]:
    counted = Counted()

    embedding = model.get_input_embeddings()
    own = embedding.forward

    def count(ids: Any) -> Any:
        counted.forwards.append(ids.numel())
        return own(ids)

    embedding.forward = count  # no hook, which would be part of the key of a prefix
    try:
        yield counted
    finally:
        del embedding.forward


@torch.no_grad()
def forward(model: Any, cache: Any, ids: Any, **arguments: Any) -> torch.Tensor:
    ids = ids if isinstance(ids, torch.Tensor) else torch.tensor([ids])
    return model(ids, **{CACHE: cache}, **arguments).logits
