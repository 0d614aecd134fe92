"""How generate() makes of its arguments the settings, logits processors and clean tokens that it works with: private
functions of transformers. With `compat` and `compat_beams` the only files that look at what differs between versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from hfpaged.spread import input_device


def generation_config_of(
    model: PreTrainedModel, given: GenerationConfig | None, arguments: dict[str, Any], prompt_length: int
) -> GenerationConfig:
    """What generate(generation_config=given, **arguments) would work with, for one prompt without padding: the model's
    defaults filled in, `max_length` and `min_length` with the prompt, the special tokens as tensors.

    `arguments` are names that a GenerationConfig has. Raises ValueError where generate() would.
    """
    has_default = {
        name: all(value is None for value in (arguments.get(name), getattr(given, name, None)))
        and getattr(model.generation_config, name) is None
        for name in ("max_length", "min_length")
    }
    # The arguments are put in afterwards, as generate() does itself: both together it calls deprecated.
    config, _ = model._prepare_generation_config(given)
    config.update(**arguments)
    model._prepare_special_tokens(config, True, device=input_device(model), batch_size=1)
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=has_default["max_length"],
        has_default_min_length=has_default["min_length"],
        model_input_name="input_ids",
        input_ids_length=prompt_length,
        inputs_tensor=None,
    )
    return config


def logits_processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt_ids: Sequence[int],
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None,
    custom: LogitsProcessorList,
) -> LogitsProcessorList:
    """generate()'s own processors for this prompt, in its order, with `custom` where it puts them. Each row is one
    sequence, or one request's beams. Raises ValueError or TypeError for values that a processor refuses.
    """
    if config.num_beams == 1:
        config = copy.copy(config)
        config.num_return_sequences = 1  # newer ones expect the rows of all samples together
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt_ids),
        encoder_input_ids=torch.tensor([list(prompt_ids)], device=input_device(model)),
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=custom,
        device=input_device(model),
    )


class CleanTokens:
    """The text of single tokens as transformers compares them with stop strings: bytes where the tokenizer has tokens
    of single bytes, else str. Each token is looked at once, when it comes: a whole vocabulary takes seconds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        self._one = _OneToken(tokenizer)
        # Made once: clean_tokenizer_vocab() makes it anew for each vocabulary, which takes longer than all else.
        self._byte_decoder = StopStringCriteria._byte_level_decoder() if self._mode == "byte_level" else None
        self._known: dict[int, Any] = {}

    def encode(self, stop_string: str) -> str | bytes:
        """A stop string in the form that tokens have here."""
        found: str | bytes = StopStringCriteria._get_stop_strings_for_matching((stop_string,), self._mode)[0]
        return found

    def __getitem__(self, token_id: int) -> Any:
        """str or bytes; None for an id that the tokenizer does not know, which no stop string reaches across."""
        if token_id not in self._known:
            self._known[token_id] = self._clean(token_id)
        return self._known[token_id]

    def _clean(self, token_id: int) -> Any:
        token = self._one.hold(token_id)
        if token is None:
            return None
        raw = StopStringCriteria._token_to_bytes(token, self._mode, self._byte_decoder)
        if raw is not None:
            return raw
        clean, _ = StopStringCriteria.clean_tokenizer_vocab(self._one, stop_string_matching_mode=self._mode)
        return clean[0]


class _OneToken:
    """A tokenizer whose vocabulary is one token of another's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)
        self._vocab: dict[str, int] = {}
        self._encoded: dict[str, Any] = {}

    def hold(self, token_id: int) -> str | None:
        """Take this token; None where there is no such."""
        known = 0 <= token_id < self._size
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id) if known else None
        self._vocab = {} if token is None else {token: token_id}
        return token

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Of the one text that every token is put behind."""
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer(text, **kwargs)
        return self._encoded[text]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
