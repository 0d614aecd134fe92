"""Strings that end a sequence: found in tokens as generate() finds them, and in text as it is streamed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from hfpaged.compat_generation import CleanTokens

Text = TypeVar("Text", str, bytes)


class Found(NamedTuple):
    """Stop string number `which`, at `start` of what was searched, up to before `end`."""

    which: int
    start: int
    end: int


def first_stop(text: Text, stops: Sequence[Text], known: int = 0) -> Found | None:
    """The stop string that is complete first, of those that end behind the first `known` characters; of several that
    end together the longest. It is the same one however the text is cut into pieces.
    """
    best: Found | None = None
    for which, stop in enumerate(stops):
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < (best.end, best.start)):
            best = Found(which, start, start + len(stop))
    return best


def may_become_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` are the beginning of a stop string that is not complete."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    for count in range(longest, 0, -1):
        tail = text[-count:]
        if any(stop.startswith(tail) for stop in stops):
            return count
    return 0


class TokenStopStrings(StoppingCriteria):
    """Stops where transformers' StopStringCriteria does: where the last token completes a string, which may begin
    anywhere in earlier ones, the prompt's too. Looks at those few tokens only, and at no table of all tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._clean = _clean_tokens(tokenizer, len(tokenizer))
        self._stops: list[Any] = [self._clean.encode(text) for text in strings]
        self._longest = max(len(stop) for stop in self._stops)

    def find(self, token_ids: Sequence[int]) -> str | None:
        """The string that the last token completes."""
        last = self._clean[token_ids[-1]]
        if not last:
            return None
        text = self._before(token_ids, last) + last
        found = first_stop(text, self._stops, len(text) - len(last))
        return None if found is None else self.strings[found.which]

    def _before(self, token_ids: Sequence[int], last: Any) -> Any:
        """What stands before the last token, as far as a stop string reaches back."""
        pieces: list[Any] = []
        missing = self._longest - 1
        # As many tokens as transformers looks at: with empty ones between it does not reach all the way.
        for place in range(len(token_ids) - 2, max(-1, len(token_ids) - 1 - self._longest), -1):
            piece = self._clean[token_ids[place]]
            if missing <= 0 or piece is None:
                break
            pieces.append(piece)
            missing -= len(piece)
        return last[:0].join(reversed(pieces))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """input_ids [rows, length] int64; gives [rows] bool back."""
        return torch.tensor([self.find(row) is not None for row in input_ids.tolist()], device=input_ids.device)


@functools.lru_cache(maxsize=8)
def _clean_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> CleanTokens:
    """Kept for the next request, as long as no token is added."""
    return CleanTokens(tokenizer)
