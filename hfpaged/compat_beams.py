"""One step of transformers' beam search, for one prompt: its own functions in its own order. They are private, and only
this file calls them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

# The score of what must not be chosen, as transformers has it.
NEVER = -1.0e9


@dataclass(frozen=True)
class BeamRules:
    """What does not change during a search; `num_eos` token ids end a sequence."""

    num_beams: int
    num_eos: int
    max_new_tokens: int
    do_sample: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def num_candidates(self) -> int:
        """How many continuations are looked at in a step: so many that `num_beams` go on even where the best end."""
        return max(2, 1 + self.num_eos) * self.num_beams


class Beams(NamedTuple):
    """Sequences of one kind (running, finished, or candidates of both), best first, without the prompt: transformers'
    functions ask for lengths behind it only, and gathering a long one for each candidate is most of a step.

    tokens   [1, count, max_new_tokens] int64
    scores   [1, count] float32, sums of logarithms of probabilities (divided by the length penalty if finished)
    parents  [1, count, max_new_tokens] int32: for each token the beam that it was appended to, then -1
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass
class BeamState:
    """A search between two steps: running beams have `length` tokens. is_finished [1, num_beams] says which of
    `finished` are there at all, can_improve [1, 1] whether the running ones can still become better than those.
    """

    length: int
    running: Beams
    finished: Beams
    is_finished: Tensor
    can_improve: Tensor


def first_state(rules: BeamRules, device: torch.device) -> BeamState:
    """The state before the first step. Only the first beam can be chosen from, since all are equal."""
    shape = (1, rules.num_beams)
    tokens = torch.zeros((*shape, rules.max_new_tokens), dtype=torch.int64, device=device)
    scores = torch.zeros(shape, device=device)
    scores[:, 1:] = NEVER
    parents = torch.full((*shape, rules.max_new_tokens), -1, dtype=torch.int32, device=device)
    return BeamState(
        length=0,
        running=Beams(tokens, scores, parents),
        finished=Beams(tokens.clone(), torch.full_like(scores, NEVER), parents.clone()),
        is_finished=torch.zeros(shape, dtype=torch.bool, device=device),
        can_improve=torch.ones((1, 1), dtype=torch.bool, device=device),
    )


def candidates(
    model: PreTrainedModel, rules: BeamRules, state: BeamState, log_probs: Tensor, generator: torch.Generator | None
) -> Beams:
    """The best (or sampled) continuations of all running beams by one token; `log_probs` [num_beams, vocab] float32."""
    scores = (log_probs[None] + state.running.scores[:, :, None]).reshape(1, -1)
    vocab = {"vocab_size": log_probs.shape[-1]} if _wants_vocab_size() else {}
    with _Draws(generator):
        scores, tokens, parents = model._get_top_k_continuations(
            accumulated_log_probs=scores,
            running_sequences=state.running.tokens,
            running_beam_indices=state.running.parents,
            cur_len=state.length,
            decoder_prompt_len=0,
            do_sample=rules.do_sample,
            beams_to_keep=rules.num_candidates,
            num_beams=rules.num_beams,
            batch_size=1,
            **vocab,
        )
    return Beams(tokens, scores, parents)


def next_state(
    model: PreTrainedModel, rules: BeamRules, state: BeamState, found: Beams, has_ended: Tensor
) -> tuple[BeamState, Tensor]:
    """(the state after the step, whether the search goes on: a bool tensor of no dimension). `has_ended`
    [num_candidates] bool says which of `found` hit a stopping criterion.
    """
    hits = has_ended[None]
    tokens, scores, parents = model._get_running_beams_for_next_iteration(
        topk_log_probs=found.scores,
        topk_running_sequences=found.tokens,
        topk_running_beam_indices=found.parents,
        next_token_hits_stopping_criteria=hits,
        num_beams=rules.num_beams,
    )
    finished, is_finished = _finished(model, rules, state, found, hits)
    length = state.length + 1
    can_improve = model._check_early_stop_heuristic(
        is_early_stop_heuristic_unsatisfied=state.can_improve,
        running_beam_scores=scores,
        beam_scores=finished.scores,
        is_sent_finished=is_finished,
        cur_len=length,
        max_length=rules.max_new_tokens,
        decoder_prompt_len=0,
        early_stopping=rules.early_stopping,
        length_penalty=rules.length_penalty,
    )
    goes_on = model._beam_search_has_unfinished_sequences(can_improve, is_finished, hits, rules.early_stopping)
    return BeamState(length, Beams(tokens, scores, parents), finished, is_finished, can_improve), goes_on


def _finished(
    model: PreTrainedModel, rules: BeamRules, state: BeamState, found: Beams, hits: Tensor
) -> tuple[Beams, Tensor]:
    """The best finished sequences of before and of now, and which of them are there."""
    is_top = torch.arange(rules.num_candidates, device=hits.device) < rules.num_beams
    tokens, scores, parents, is_finished = model._update_finished_beams(
        sequences=state.finished.tokens,
        topk_running_sequences=found.tokens,
        beam_scores=state.finished.scores,
        topk_log_probs=found.scores,
        beam_indices=state.finished.parents,
        topk_running_beam_indices=found.parents,
        is_early_stop_heuristic_unsatisfied=state.can_improve,
        is_sent_finished=state.is_finished,
        next_token_hits_stopping_criteria=hits,
        top_num_beam_mask=is_top,
        num_beams=rules.num_beams,
        cur_len=state.length,
        decoder_prompt_len=0,
        length_penalty=rules.length_penalty,
        early_stopping=rules.early_stopping,
    )
    return Beams(tokens, scores, parents), is_finished


class _Draws(TorchFunctionMode):
    """Lets torch.multinomial draw from `generator` instead of the global one: transformers' beam search names none.
    A mode holds for its own thread only, so that whatever else draws meanwhile neither sees nor disturbs it.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.multinomial:
            return func(*args, **({"generator": self._generator} | (kwargs or {})))
        return func(*args, **(kwargs or {}))


@functools.cache
def _wants_vocab_size() -> bool:
    """Whether transformers asks for the size of the vocabulary (5.17), or reads it off the scores."""
    return "vocab_size" in inspect.signature(GenerationMixin._get_top_k_continuations).parameters
