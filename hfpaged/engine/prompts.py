"""Prompts as people give them: texts, lists of token ids, tensors, and what tokenizers give back."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
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
    elif isinstance(prompt, Mapping):
        prompt = _one(prompt)
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
    """Several prompts, or one, as a list of prompts. Raises InvalidConfigError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _encoded(prompts)
    try:
        items = list(prompts)
    except TypeError as error:
        raise InvalidConfigError(
            f"prompts={prompts!r} is no prompt; give a text, token ids, or a list of either"
        ) from error
    is_one = bool(items) and all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in items)
    return [items] if is_one else items


def _encoded(encoding: Mapping[str, Any]) -> list[Any]:
    """The prompts in what tokenizer(...) and apply_chat_template(...) give back, without their padding."""
    if "input_ids" not in encoding:
        raise InvalidConfigError(
            f"a prompt with the keys {sorted(map(str, encoding))} has no input_ids; give what the tokenizer gives "
            "back, of messages tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
        )
    rows, mask = listed(encoding["input_ids"]), encoding.get("attention_mask")
    if mask is None:
        return rows
    return [
        [int(token) for token, is_kept in zip(row, kept, strict=True) if is_kept]
        for row, kept in zip(rows, listed(mask), strict=True)
    ]


def _one(encoding: Mapping[str, Any]) -> Any:
    rows = _encoded(encoding)
    if len(rows) != 1:
        raise InvalidConfigError(f"one request has one prompt, and these are {len(rows)}; use generate() for several")
    return rows[0]


def per_prompt(settings: Any, count: int) -> list[Any]:
    """Settings for each of `count` prompts: a list of so many, or one for all. Raises InvalidConfigError."""
    if not isinstance(settings, (list, tuple)):
        return [settings] * count
    if len(settings) != count:
        raise InvalidConfigError(
            f"{len(settings)} generation configs for {count} prompts; give one for each, or one for all"
        )
    return list(settings)
