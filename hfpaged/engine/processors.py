"""What is done to one sequence's logits before a token is chosen: transformers' own processors in generate()'s order,
with ours for OpenAI's penalties and biases among them.

    [ need the tokens so far: row by row ][ look at scores only: one pass for all rows with equal settings ]

The second part is the longest tail of the list of which that is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hfpaged import compat_generation
from hfpaged.engine.params import RequestParams
from hfpaged.errors import InvalidConfigError


class GeneratedTokensPenalty(LogitsProcessor):
    """OpenAI's frequency and presence penalty: of the logits of tokens that were generated, not of the prompt's.

    logit[t] -= count[t] * frequency + (count[t] > 0) * presence
    """

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [rows, length] int64, scores [rows, vocab] float32; gives new scores back."""
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - counts * self.frequency - (counts > 0) * self.presence


class LogitBias(LogitsProcessor):
    """Adds to the logits of single tokens, at every step."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = tuple(sorted(bias.items()))
        self._added: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [rows, vocab] float32; gives new scores back."""
        if self._added is None or self._added.device != scores.device:
            ids, values = zip(*self.bias, strict=True)
            places = torch.tensor(ids, device=scores.device)
            added = torch.zeros(scores.shape[-1], device=scores.device)
            self._added = added.scatter_(0, places, torch.tensor(values, dtype=added.dtype, device=scores.device))
        return scores + self._added


class NoEndBefore(LogitsProcessor):
    """What transformers' processors of a minimal length do, without a mask of the whole vocabulary in each step."""

    def __init__(self, length: int, eos_token_ids: Tensor) -> None:
        self.length, self._ids = length, eos_token_ids
        self._is_checked = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [rows, length] int64, scores [rows, vocab] float32; the scores are written into."""
        if not self._is_checked:
            known = (self._ids >= 0) & (self._ids < scores.shape[-1])
            self._ids, self._is_checked = self._ids[known].to(scores.device), True
        return scores.index_fill_(1, self._ids, -torch.inf) if input_ids.shape[-1] < self.length else scores


# Exactly these classes: a subclass may look at the tokens after all.
_SCORES_ONLY = {
    *(EpsilonLogitsWarper, EtaLogitsWarper, InfNanRemoveLogitsProcessor, LogitBias, LogitNormalization),
    *(MinPLogitsWarper, SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopHLogitsWarper),
    *(TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper),
}


class SequenceProcessors:
    """The processors of one sequence. Some keep state (a watermark's), so each sequence has its own."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        """`processors`: as generate() would have them for this prompt alone."""
        split = len(processors)
        while split and type(processors[split - 1]) in _SCORES_ONLY:
            split -= 1
        self.all = processors
        self.of_history = LogitsProcessorList(_cheaper(p) for p in processors[:split])
        self.of_scores = LogitsProcessorList(processors[split:])
        self.key: Hashable = tuple(_key(processor) for processor in self.of_scores)

    def at(self, length: int) -> LogitsProcessorList:
        """Those that need the tokens and change anything after `length` of them, the prompt's included."""
        return LogitsProcessorList(p for p in self.of_history if not _is_idle(p, length))


def build_processors(model: PreTrainedModel, params: RequestParams, prompt_ids: Sequence[int]) -> LogitsProcessorList:
    """All processors of a request's sequence, or of its beams together. Raises InvalidConfigError for settings that
    one of them refuses.
    """
    ours: list[LogitsProcessor] = []
    if params.frequency_penalty or params.presence_penalty:
        penalties = params.frequency_penalty, params.presence_penalty
        ours.append(GeneratedTokensPenalty(len(prompt_ids), *penalties))
    if params.logit_bias:
        ours.append(LogitBias(dict(params.logit_bias)))
    own = (_for_sequence(processor, len(prompt_ids)) for processor in params.logits_processor)
    custom = LogitsProcessorList([*ours, *own])
    try:
        return compat_generation.logits_processors(
            model, params.config, prompt_ids, params.prefix_allowed_tokens_fn, custom
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidConfigError(f"a logits processor refuses its settings: {error}") from error


def _for_sequence(processor: Any, prompt_length: int) -> Any:
    """A request's own processor. One that keeps state of a sequence says so by a method `for_sequence(prompt_length)`,
    which gives another one with a state of its own; else all samples of the request share it.
    """
    make = getattr(processor, "for_sequence", None)
    return processor if make is None else make(prompt_length)


def _key(processor: Any) -> Hashable:
    """Equal for processors of scores that do the same."""
    values = ((name, _plain(value)) for name, value in vars(processor).items() if not name.startswith("_"))
    return type(processor), tuple(sorted(values))


def _plain(value: Any) -> Hashable:
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else value


def _cheaper(processor: Any) -> Any:
    if type(processor) is MinLengthLogitsProcessor:
        return NoEndBefore(processor.min_length, processor.eos_token_id)
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        return NoEndBefore(processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id)
    return processor


def _is_idle(processor: Any, length: int) -> bool:
    """Whether a processor does nothing at this length. Of classes that are not known nobody can tell."""
    kind = type(processor)
    if kind is NoEndBefore:
        return bool(length >= processor.length)
    if kind is SuppressTokensAtBeginLogitsProcessor:
        return bool(length != processor.begin_index)
    if kind is ForcedBOSTokenLogitsProcessor:
        return length != 1
    if kind is ForcedEOSTokenLogitsProcessor:
        return bool(length != processor.max_length - 1)
    return False
