"""Prompts as people give them: texts, lists of token ids, tensors."""

from __future__ import annotations

from array import array
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.content import one_prompt
from hfpaged.errors import InvalidConfigError


def read_prompt(
    prompt: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> tuple[array[int], str | None]:
    """The token ids of one prompt, and its text where it is one.

    Raises InvalidConfigError for an empty prompt, for text without a tokenizer, and for what are no token ids.
    """
    text = prompt if isinstance(prompt, str) else None
    if text is not None:
        if tokenizer is None:
            raise InvalidConfigError("a prompt that is text needs a tokenizer: ContinuousBatcher(model, tokenizer)")
        prompt = tokenizer(text)["input_ids"]
    ids = one_prompt(prompt)
    if not ids:
        raise InvalidConfigError("the prompt is empty; give it one token at least, the beginning-of-sequence one say")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidConfigError(
            f"the prompt has the token id {wrong}, and the model knows 0 to {vocab_size - 1}; use its own tokenizer"
        )
    return ids, text


def listed(prompts: Any) -> list[Any]:
    """Several prompts, or one, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    is_one = bool(items) and all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in items)
    return [items] if is_one else items


def per_prompt(settings: Any, count: int) -> list[Any]:
    """Settings for each of `count` prompts: a list of so many, or one for all. Raises InvalidConfigError."""
    if not isinstance(settings, (list, tuple)):
        return [settings] * count
    if len(settings) != count:
        raise InvalidConfigError(
            f"{len(settings)} generation configs for {count} prompts; give one for each, or one for all"
        )
    return list(settings)
