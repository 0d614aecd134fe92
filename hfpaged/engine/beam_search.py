"""Beam search of one request as a state machine: it is given logits, and says which beams go on with which tokens. It
knows no model run, no cache and no blocks, and its choices are transformers' own.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hfpaged import compat_beams
from hfpaged.engine.outputs import FinishReason
from hfpaged.errors import InvalidConfigError, InvalidLogitsError
from hfpaged.spread import input_device


@dataclass(frozen=True)
class BeamSettings:
    """What generate() is told by the parameters of the same names. `seed` is for do_sample; None: a fresh one.

    Raises InvalidConfigError for numbers that cannot be.
    """

    num_beams: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.num_beams < 1 or self.max_new_tokens < 1:
            raise InvalidConfigError(
                f"num_beams={self.num_beams} with max_new_tokens={self.max_new_tokens}: a search has at least one beam "
                "and one new token; use 1 or more for both"
            )


class BeamMove(NamedTuple):
    """Beam i goes on as beam `parents[i]` with `tokens[i]` appended."""

    parents: list[int]
    tokens: list[int]


class BeamHypothesis(NamedTuple):
    """A finished sequence: its new tokens, and the score that they are ordered by (the sum of the logarithms of their
    probabilities divided by length ** length_penalty).
    """

    token_ids: list[int]
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """One request's beams: call `advance` with the logits of all of them until `is_done`, then ask for `results`.

    `processors` and `stopping` are what generate() would have for this prompt; the end of sequence and the number of
    new tokens are taken care of by `settings`. At the first step there is one beam, the prompt.
    """

    def __init__(
        self, model: PreTrainedModel, settings: BeamSettings, prompt_ids: Sequence[int],
        processors: LogitsProcessorList | None = None, stopping: StoppingCriteriaList | None = None,
    ) -> None:  # fmt: skip
        if len(prompt_ids) == 0:
            raise InvalidConfigError("prompt_ids has 0 token ids, and a search begins behind a prompt; give 1 or more")
        self.settings, self.is_done = settings, False
        self.seed = secrets.randbits(63) if settings.seed is None else settings.seed
        self._model, self._device = model, input_device(model)
        self._processors, self._stopping = processors or LogitsProcessorList(), StoppingCriteriaList(stopping or ())
        self._ends = EosTokenCriteria(list(settings.eos_token_ids)) if settings.eos_token_ids else None
        self._generator = torch.Generator(self._device).manual_seed(self.seed) if settings.do_sample else None
        self._prompt = torch.tensor([list(prompt_ids)], device=self._device)
        self._rules = _rules(settings)
        self._state = compat_beams.first_state(self._rules, self._device)
        self._stopped_at_end: set[tuple[int, ...]] = set()

    @property
    def num_beams(self) -> int:
        """Beams that wait for logits: one before the first step, then all."""
        return self.settings.num_beams if self._state.length else 1

    @property
    def beams(self) -> list[array[int]]:
        """The token ids of the running beams, with the prompt."""
        return [array("q", row) for row in self._with_prompt(self._running[: self.num_beams]).tolist()]

    @torch.no_grad()
    def advance(self, logits: Tensor) -> BeamMove:
        """One step: `logits` [num_beams, vocab], those behind the last token of each of `beams`, of any float dtype.

        Raises InvalidLogitsError, with nothing changed, for logits (or what the processors made of them) that are no
        numbers, and whatever a processor or a stopping criterion raises.
        """
        assert not self.is_done, "the search has ended"
        assert logits.shape[0] == self.num_beams, f"{logits.shape[0]} rows of logits for {self.num_beams} beams"
        state = self._state
        found = compat_beams.candidates(self._model, self._rules, state, self._processed(logits), self._generator)
        tokens = found.tokens[0, :, : state.length + 1]
        stops = self._stops(tokens)
        is_last = tokens.shape[1] == self.settings.max_new_tokens
        if is_last:
            self._stopped_at_end = {tuple(row) for row in tokens[stops].tolist()}
        self._state, goes_on = compat_beams.next_state(self._model, self._rules, state, found, stops | is_last)
        return self._moved(goes_on)

    def results(self, n: int) -> list[BeamHypothesis]:
        """The `n` best finished sequences, best first; fewer while the search still runs (then `beams` has the others).

        Raises InvalidConfigError for more than the search has beams.
        """
        if not 1 <= n <= self.settings.num_beams:
            raise InvalidConfigError(
                f"{n} sequences of a search with num_beams={self.settings.num_beams}: it ends with as many as it has "
                "beams; ask for fewer, or give it more beams"
            )
        finished = self._state.finished
        lengths = (finished.parents[0] >= 0).sum(dim=-1).tolist()
        rows = zip(finished.tokens[0].tolist(), lengths, finished.scores[0].tolist(), strict=True)
        found = [BeamHypothesis(row[:length], score, self._reason(row[:length])) for row, length, score in rows]
        is_there = self._state.is_finished[0].tolist()
        return [each for each, there in zip(found[:n], is_there, strict=False) if there or self.is_done]

    def _processed(self, logits: Tensor) -> Tensor:
        """Logarithms of probabilities, [settings.num_beams, vocab] float32, after the processors."""
        log_probs = torch.log_softmax(logits.to(self._device, torch.float32), dim=-1)
        log_probs = log_probs.repeat(self.settings.num_beams // self.num_beams, 1)
        if self._processors:
            log_probs = self._processors(self._with_prompt(self._running), log_probs)
        self._check(log_probs)
        return log_probs

    def _check(self, log_probs: Tensor) -> None:
        """Raises InvalidConfigError for a vocabulary too small for the beams, InvalidLogitsError for NaN."""
        if log_probs.numel() < self._rules.num_candidates:
            raise InvalidConfigError(
                f"num_beams={self.settings.num_beams} looks at {self._rules.num_candidates} continuations a step, and "
                f"a vocabulary of {log_probs.shape[-1]} has {log_probs.numel()}; use fewer end-of-sequence tokens"
            )
        bad = int(log_probs.amax(dim=-1).isnan().sum())
        if bad:
            raise InvalidLogitsError(bad, len(log_probs))

    def _stops(self, tokens: Tensor) -> Tensor:
        """Which of the candidates [num_candidates, new tokens] end by a token or a criterion: bool [num_candidates]."""
        stops = torch.zeros(len(tokens), dtype=torch.bool, device=self._device)
        if self._ends is not None:
            stops = self._ends(tokens, None)
        return stops | self._stopping(self._with_prompt(tokens), None) if self._stopping else stops

    def _moved(self, goes_on: Tensor) -> BeamMove:
        """What the step just made has chosen, read from the device at once."""
        last = self._state.length - 1
        parents = self._state.running.parents[0, :, last]
        if last == 0:  # all beams were the prompt, which is kept once
            parents = torch.zeros_like(parents)
        tokens = self._state.running.tokens[0, :, last]
        *numbers, goes_on_too = torch.cat([parents, tokens, goes_on.reshape(1)]).tolist()
        self.is_done = not goes_on_too
        return BeamMove(numbers[: len(parents)], numbers[len(parents) :])

    @property
    def _running(self) -> Tensor:
        """The new tokens of the running beams, [settings.num_beams, length]."""
        return self._state.running.tokens[0, :, : self._state.length]

    def _with_prompt(self, tokens: Tensor) -> Tensor:
        return torch.cat([self._prompt.expand(len(tokens), -1), tokens], dim=-1)

    def _reason(self, token_ids: list[int]) -> FinishReason:
        is_full = len(token_ids) == self.settings.max_new_tokens
        return "length" if is_full and tuple(token_ids) not in self._stopped_at_end else "stop"


def _rules(settings: BeamSettings) -> compat_beams.BeamRules:
    return compat_beams.BeamRules(
        num_beams=settings.num_beams,
        num_eos=len(settings.eos_token_ids),
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.do_sample,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early_stopping,
    )
