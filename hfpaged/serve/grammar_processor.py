"""Which tokens may come next by a grammar: a logits processor of transformers' kind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.serve.grammar import llguidance
from hfpaged.serve.http_errors import ApiError

# Of tokens that the grammar wants and another processor has banned: they come where nothing else may.
LOWEST = -1e30
# For each byte of a mask of bits, the lowest first, what is added to the 8 scores [256, 8]. To add takes a twentieth of
# the time that masked_fill() takes, which guesses wrong at each second token.
_ADDED = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)


def grammar_processor(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, grammar: str, param: str = "response_format"
) -> GrammarProcessor:
    """For the `logits_processor` of one request. To be made in a worker thread: a grammar may take 100 ms. `param` is
    the field that errors are about.

    Raises ApiError 400 for a grammar that does not compile, with llguidance's reason, and 422 for a tokenizer that it
    cannot use.
    """
    matcher = llguidance().LLMatcher(grammar_tokenizer(tokenizer, model), grammar, log_level=0)
    if matcher.is_error():
        raise ApiError(
            400, f"the format of the answer is none that this server can hold a model to: {matcher.get_error()}",
            code="invalid_grammar", param=param,
        )  # fmt: skip
    return GrammarProcessor(matcher, end_token_ids(tokenizer, model))


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end an answer: the model's, or where it has none, the tokenizer's."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = tokenizer.eos_token_id if ends is None else ends
    return tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (int(ends),)


def with_end(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> dict[str, Any]:
    """Settings of a request with a grammar, whose last token ends it also where the model has no such token itself."""
    config = model.generation_config
    if "logits_processor" not in settings or (config is not None and config.eos_token_id is not None):
        return settings
    return settings | {"eos_token_id": [*settings.get("eos_token_id", ()), *end_token_ids(tokenizer, model)]}


def grammar_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Any:
    """llguidance's view of a tokenizer, made once: that holds all threads up for 0.3 s (49,000 tokens), so a server
    does it before it is ready. Raises ApiError 422 for tokenizers that cannot be used.
    """
    vocab_size = max(len(tokenizer), model.config.get_text_config().vocab_size)
    return _grammar_tokenizer(tokenizer, end_token_ids(tokenizer, model), vocab_size)


def warm_up_grammars(tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel) -> None:
    """Do that before requests come; where it cannot be done, those that want it will be told."""
    if tokenizer is not None:
        with contextlib.suppress(ApiError):
            grammar_tokenizer(tokenizer, model)


@functools.lru_cache(maxsize=4)
def _grammar_tokenizer(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], vocab_size: int) -> Any:
    llguidance()
    try:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends) or None)
    except Exception as error:  # a slow tokenizer, a decoder that it does not know, no end-of-sequence token
        raise ApiError(
            422, f"the tokenizer of this model cannot be held to a format: {error}; ask for text, or serve the model "
            "with a fast tokenizer of byte-level BPE or byte fallback", code="tokenizer_without_grammar",
            param="response_format",
        ) from error  # fmt: skip


class GrammarProcessor(LogitsProcessor):
    """Leaves the scores of tokens that the grammar allows, and bans all others; the end exactly where it accepts.

    What has been read of the grammar is derived from the tokens behind the prompt at each call: it may be given the
    tokens of any sequence, of drafts that are taken back, of beams. What goes on where the last call was costs one
    token; else it goes back to where both were the same.
    """

    def __init__(self, matcher: Any, end_token_ids: Iterable[int], prompt_length: int = 0) -> None:
        self.prompt_length = prompt_length
        self._matcher, self._ends = matcher, tuple(end_token_ids)
        self._read: list[int] = []  # what the matcher has consumed

    def for_sequence(self, prompt_length: int) -> GrammarProcessor:
        """One for a sequence of its own, whose prompt has so many tokens."""
        return GrammarProcessor(self._matcher.deep_copy(), self._ends, prompt_length)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [rows, length] int64, scores [rows, vocab] float32; gives new scores back. Raises ApiError 422
        where the grammar has become too complex for llguidance's limits.
        """
        histories = input_ids[:, self.prompt_length :].tolist()
        added = [self._added(tokens, scores.shape[-1]) for tokens in histories]
        return scores.clamp(min=LOWEST).add_(torch.from_numpy(np.stack(added)).to(scores.device))

    def _added(self, tokens: list[int], vocab_size: int) -> Any:
        """[vocab] float32: 0 for what may follow these tokens, else -inf. Behind an end, or what the grammar does not
        know (a draft that will be thrown away), only an end may.
        """
        if not self._go_to(tokens):
            return _only(self._ends, vocab_size)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        added = _ADDED.take(mask, axis=0).reshape(-1)
        missing = max(0, vocab_size - len(added))
        return np.pad(added, (0, missing), constant_values=-np.inf) if missing else added[:vocab_size]

    def _go_to(self, tokens: list[int]) -> bool:
        """Let the matcher have consumed just these; False if that cannot be."""
        common = _common(self._read, tokens)
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
            del self._read[common:]
        new = tokens[common:]
        if not new:
            return True
        if any(token in self._ends for token in new):
            return False
        count = self._matcher.try_consume_tokens(new)
        if count < len(new):
            self._check()
        self._read += new[:count]
        return bool(count == len(new))

    def _check(self) -> None:
        """A token that the grammar does not know is no error; one that takes more than the limits is."""
        if self._matcher.is_error():
            raise ApiError(
                422, f"the format asked for cannot be followed any further: {self._matcher.get_error()}; ask for a "
                "simpler one", code="grammar_too_complex", param="response_format",
            )  # fmt: skip


def _only(token_ids: Iterable[int], vocab_size: int) -> Any:
    added = np.full(vocab_size, -np.inf, np.float32)
    added[[token for token in token_ids if token < vocab_size]] = 0.0
    return added


def _common(left: list[int], right: list[int]) -> int:
    """How many tokens both begin with."""
    if right[: len(left)] == left:  # nearly always, and fast
        return len(left)
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
