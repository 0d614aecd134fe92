"""When a sequence ends: where generate() would end it, but without its tensors where no tensors are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from hfpaged.engine.outputs import FinishReason
from hfpaged.engine.params import RequestParams
from hfpaged.engine.stop_strings import TokenStopStrings
from hfpaged.errors import CallbackError

# Their numbers are among the params, where they took the place of generate()'s.
_IN_PARAMS = (EosTokenCriteria, MaxLengthCriteria)


class Stop(NamedTuple):
    """Why a sequence ended: the end-of-sequence token or the stop string, where it was one."""

    reason: FinishReason
    by: int | str | None = None


class StopConditions:
    """All that can end the sequences of one request. The clock of max_time starts here."""

    def __init__(self, params: RequestParams, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._params = params
        self._strings: TokenStopStrings | None = None
        if params.stop_strings and tokenizer is not None:
            self._strings = TokenStopStrings(tokenizer, params.stop_strings)
        self._criteria = [c for c in params.stopping_criteria if type(c) not in _IN_PARAMS]
        has_own_clock = any(type(criterion) is MaxTimeCriteria for criterion in self._criteria)
        if params.config.max_time is not None and not has_own_clock:
            self._criteria.append(MaxTimeCriteria(params.config.max_time))

    @property
    def for_beams(self) -> StoppingCriteriaList:
        """Strings, time, and the request's own criteria, for a search that knows the number of tokens and the
        end-of-sequence ones.
        """
        strings = [] if self._strings is None else [self._strings]
        return StoppingCriteriaList([*strings, *self._criteria])

    def check(self, token_ids: Sequence[int]) -> Stop | None:
        """Whether a sequence ends with the last of `token_ids`, all of its tokens with the prompt; after each new one.

        Raises CallbackError where one of the request's own criteria does.
        """
        last = token_ids[-1]
        if last in self._params.stop_token_ids:
            return Stop("stop", last)
        if self._strings is not None and (text := self._strings.find(token_ids)) is not None:
            return Stop("stop", text)
        if self._criteria and (stop := self._by_criteria(token_ids)):
            return stop
        if len(token_ids) - self._params.prompt_length >= self._params.max_new_tokens:
            return Stop("length")
        return None

    def _by_criteria(self, token_ids: Sequence[int]) -> Stop | None:
        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        for criterion in self._criteria:
            if _says_stop(criterion, ids):
                return Stop("length" if type(criterion) is MaxTimeCriteria else "stop")
        return None


def _says_stop(criterion: Any, ids: torch.Tensor) -> bool:
    """`ids` [1, length] int64."""
    name = type(criterion).__name__
    try:
        return bool(torch.as_tensor(criterion(ids, None)).all())
    except Exception as error:
        raise CallbackError(f"the stopping criterion {name} raised {type(error).__name__}: {error}") from error
