"""Logprobs as OpenAI's clients read them: by the texts of tokens."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.compat_generation import CleanTokens
from hfpaged.engine.outputs import PositionLogprobs, TokenLogprob

_UTF8 = codecs.getincrementaldecoder("utf-8")
LEAST = -9999.0  # for minus infinity, which JSON does not know


class TokenTexts:
    """Text and bytes of single tokens. A token that is half a character has bytes of its own, and no text but "\ufffd".

    `as_ids`: texts are such as "token_id:17", as they are without a tokenizer.
    """

    _clean: CleanTokens | None
    _known: dict[int, tuple[str, list[int]]]
    _special: frozenset[int]

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, as_ids: bool = False) -> None:
        self._clean, self._known, self._special = None, {}, frozenset()
        if tokenizer is not None and not as_ids:
            self._clean, self._known, self._special = _seen(tokenizer, len(tokenizer))

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def text(self, token_id: int) -> str:
        return self[token_id][0]

    def is_special(self, token_id: int) -> bool:
        """Whether a text may be without it."""
        return token_id in self._special

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        clean = None if self._clean is None else self._clean[token_id]
        if clean is None:
            clean = f"token_id:{token_id}"
        raw = clean if isinstance(clean, bytes) else clean.encode()
        return raw.decode(errors="replace"), list(raw)


@functools.lru_cache(maxsize=8)
def _seen(
    tokenizer: PreTrainedTokenizerBase, size: int
) -> tuple[CleanTokens, dict[int, tuple[str, list[int]]], frozenset[int]]:
    """Kept for the next request, as long as no token is added."""
    special = frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return CleanTokens(tokenizer), {}, special


def chat_logprobs(positions: Iterable[PositionLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Of a chat's choice: each new token with its bytes and the likeliest ones."""
    return {"content": [_entry(at, texts) | {"top_logprobs": [_entry(top, texts) for top in at.top]}
                        for at in positions]}  # fmt: skip


def _entry(at: PositionLogprobs | TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    text, raw = texts[at.token_id]
    return {"token": text, "logprob": max(at.logprob, LEAST), "bytes": raw}


class CompletionLogprobs:
    """Of one choice of a completion, piece by piece: each goes on where the text of the last one ended."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0
        self._decoder = _UTF8(errors="replace")  # of a character that takes several tokens, all begin where it does

    def of(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], *, prompt: str | None = None,
        hides_special: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Of these tokens; None is one that nothing came before. Of a `prompt` this is the text, which does not have
        those that a tokenizer has put before it; an answer's text has no special ones where it `hides_special`.
        """
        tokens = [self._texts.text(token_id) for token_id in token_ids]
        offsets = []
        for token_id, token in zip(token_ids, tokens, strict=True):
            offsets.append(self._offset)
            is_hidden = hides_special if prompt is None else not prompt.startswith(token, self._offset)
            if not (is_hidden and self._texts.is_special(token_id)):
                self._offset += len(self._decoder.decode(bytes(self._texts[token_id][1])))
        return {
            "tokens": tokens,
            "token_logprobs": [None if at is None else max(at.logprob, LEAST) for at in positions],
            "top_logprobs": [None if at is None else self._top(at) for at in positions],
            "text_offset": offsets,
        }

    def _top(self, at: PositionLogprobs) -> dict[str, float]:
        """The likeliest ones, and the token itself. Of two that look the same the likelier one counts."""
        found: dict[str, float] = {}
        likeliest: list[PositionLogprobs | TokenLogprob] = [*at.top, at]
        for each in likeliest:
            found.setdefault(self._texts.text(each.token_id), max(each.logprob, LEAST))
        return found
