"""Prompt lookup: what may come next is what followed when the last few tokens stood here before. Guesses for
speculative decoding that need no second model (Saxena, "Prompt Lookup Decoding", 2023; transformers has it as
prompt_lookup_num_tokens).
"""

from __future__ import annotations

from array import array

from hfpaged.errors import InvalidConfigError

# How many guesses a sequence begins with.
FIRST = 2


class PromptLookup:
    """The guesses for one sequence, whose tokens only become more.

    A guess costs a row of the forward that verifies it, right or wrong. So their number follows what became of the
    last ones (`told`): twice as many after all were right, else as many as were right, but one at least.
    """

    def __init__(self, num_tokens: int, max_ngram: int = 3, min_ngram: int = 2) -> None:
        """At most `num_tokens` guesses at once, behind the longest n-gram of `min_ngram` to `max_ngram` tokens. Behind
        single tokens most guesses are wrong.

        Raises InvalidConfigError for numbers that cannot be.
        """
        if num_tokens < 1 or not 1 <= min_ngram <= max_ngram:
            raise InvalidConfigError(
                f"num_tokens={num_tokens}, min_ngram={min_ngram}, max_ngram={max_ngram}: prompt lookup guesses one "
                "token or more behind an n-gram of one or more; use 1 <= num_tokens and 1 <= min_ngram <= max_ngram"
            )
        self.num_tokens = num_tokens
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._behind: dict[bytes, int] = {}  # n-gram -> the position behind its last occurrence
        self._num_indexed = 0  # tokens at whose end n-grams are known
        self._limit = min(FIRST, num_tokens)

    def propose(self, token_ids: array[int]) -> list[int]:
        """Up to `num_tokens` tokens that may follow `token_ids` (all of the sequence, those of the last call first):
        those behind the last earlier occurrence of the longest final n-gram that has one. They go on through the end
        of the sequence: what repeats is expected to go on repeating.
        """
        self._index(token_ids)
        found = [self._behind.get(token_ids[max(0, len(token_ids) - size) :].tobytes()) for size in self._sizes]
        start = next((position for position in found if position is not None), None)
        return [] if start is None else _going_on(token_ids, start, self._limit)

    def told(self, proposed: int, accepted: int) -> None:
        """Of `proposed` tokens that were verified the first `accepted` were right."""
        if accepted < proposed:
            self._limit = max(1, accepted)
        elif proposed:  # fewer than were proposed, where the step had no room for all
            self._limit = min(self.num_tokens, max(self._limit, 2 * proposed))

    def _index(self, token_ids: array[int]) -> None:
        """All n-grams that have a token behind them."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._behind[token_ids[end - size : end].tobytes()] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


def _going_on(token_ids: array[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; behind the last one come those from `start` on again."""
    found = token_ids[start : start + count].tolist()
    period = len(found)
    return [found[number % period] for number in range(count)]
