"""What a model can do is tried with a few tokens before the first request comes.

Several sequences side by side are compared with each alone, and a prompt in chunks with the same at once: most models
with recurrent states go on from them when more than one token comes, but Jamba and Zamba begin anew without a word. A
model that cannot go on with a single token, or keeps the state of its sequence elsewhere than in the cache, cannot be
computed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from hfpaged import compat
from hfpaged.cache import PagedCache
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.piece import Piece
from hfpaged.errors import InvalidConfigError, OutOfBlocksError, UnsupportedModelError
from hfpaged.sequence import Sequence

# Tokens of the sequences with which packing is tried, of the chunks in which the first of them is tried again, and as
# it would be generated; and how far logits may be from those that they should be.
LENGTHS = (5, 3)
CHUNKS = (3, 2)
BY_ONE = (4, 1)
TOLERANCE = 2e-2


@torch.no_grad()
def try_out(runner: ModelRunner, spare: ModelRunner) -> None:
    """Let a pool that was promised memory learn how large its blocks are, and the runner what its model can do. That is
    tried with a `spare` runner of the same model: the pool may be smaller than what is tried, or full.

    Raises UnsupportedModelError for a model that cannot be computed from plain tokens.
    """
    if not runner.cache.pool.layer_stores:  # then nobody holds a block of it
        with refusing(runner):
            _size_blocks(runner)
    _try(spare)
    runner.packs, runner.why_separate, runner.whole_prompts = spare.packs, spare.why_separate, spare.whole_prompts


def _try(runner: ModelRunner) -> None:
    with refusing(runner):
        prompts = prompts_of(runner, LENGTHS)
        alone = torch.cat([_in_chunks(runner, prompt, [len(prompt)]) for prompt in prompts])
    _try_chunks(runner, prompts[0], alone[:1])
    with refusing(runner):
        undisturbed = _in_chunks(runner, prompts[0], BY_ONE)
        if runner.packs:
            packed = _side_by_side(runner, prompts)
            if runner.packs and not are_close(packed, alone):
                runner.stop_packing("its tokens depend on what lies beside them")
        if not runner.packs and not are_close(_in_turns(runner, prompts), undisturbed):
            raise UnsupportedModelError(
                f"{_name(runner)} keeps a state of the sequence in its own modules, not in the cache, so that a second "
                "sequence would go on from it; use generate(past_key_values=PagedCache(model)), one batch at a time"
            )


@contextlib.contextmanager
def refusing(runner: ModelRunner) -> Iterator[None]:
    """What a model raises means that it cannot be computed here: UnsupportedModelError. Not so want of memory, and
    settings that are wrong for any model, such as a swap space smaller than the block whose size is found here.
    """
    try:
        yield
    except (InvalidConfigError, OutOfBlocksError, UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{_name(runner)} cannot be computed from a sequence of plain tokens, in parts, as a batcher does "
            f"({type(error).__name__}: {error}); use generate(past_key_values=PagedCache(model))"
        ) from error


def _size_blocks(runner: ModelRunner) -> None:
    first = PagedCache(runner.model, pool=runner.cache.pool, prefix_sharing=False)
    ids = torch.zeros(1, 1, dtype=torch.long, device=runner.device)
    runner.model(input_ids=ids, **{compat.cache_argument(): first})
    first.free()


def prompts_of(runner: ModelRunner, lengths: Many[int]) -> list[list[int]]:
    """Token ids to try something with, other ones in each."""
    vocab = compat.transformers_model(runner.model).config.get_text_config(decoder=True).vocab_size
    return [[(7 + 3 * i + number) % vocab for i in range(count)] for number, count in enumerate(lengths)]


def _try_chunks(runner: ModelRunner, prompt: Many[int], expected: Tensor) -> None:
    try:
        runner.whole_prompts = not are_close(_in_chunks(runner, prompt, CHUNKS), expected)
    except (OutOfBlocksError, torch.OutOfMemoryError):
        raise
    except Exception:  # whatever it is: a whole prompt, which is tried next, may do
        runner.whole_prompts = True


def _in_chunks(runner: ModelRunner, prompt: Many[int], counts: Many[int]) -> Tensor:
    """The logits [1, vocab] behind a prompt that comes in so many tokens at a time."""
    with sequences(runner, 1) as (blocks,):
        start = 0
        for count in counts:
            logits = runner.forward([Piece(blocks, start, prompt[start : start + count], 1)])
            start += count
        return logits


def _in_turns(runner: ModelRunner, prompts: Many[Many[int]]) -> Tensor:
    """The logits [1, vocab] behind the first prompt, when another one comes before its last token."""
    prompt, other = prompts
    with sequences(runner, 2) as (blocks, others):
        runner.forward([Piece(blocks, 0, prompt[:-1], 1)])
        runner.forward([Piece(others, 0, other, 1)])
        return runner.forward([Piece(blocks, len(prompt) - 1, prompt[-1:], 1)])


def _side_by_side(runner: ModelRunner, prompts: Many[Many[int]]) -> Tensor:
    """[prompts, vocab]"""
    with sequences(runner, len(prompts)) as empty:
        return runner.forward([Piece(blocks, 0, p, 1) for blocks, p in zip(empty, prompts, strict=True)])


@contextlib.contextmanager
def sequences(runner: ModelRunner, count: int) -> Iterator[list[Sequence]]:
    """Empty ones, inside; their blocks go back."""
    pool = runner.cache.pool
    with pool.changing() as manager:
        empty = [manager.create() for _ in range(count)]
    try:
        yield empty
    finally:
        with pool.changing() as manager:
            for sequence in empty:
                manager.free(sequence)


def _name(runner: ModelRunner) -> str:
    return type(compat.transformers_model(runner.model)).__name__


def are_close(logits: Tensor, expected: Tensor) -> bool:
    """Whether two ways to compute the same give the same, but for rounding."""
    return torch.allclose(logits, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.std()))
