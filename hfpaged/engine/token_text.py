"""Text from tokens as they come: what is sure of it, at a cost that does not grow with what came before.

Only a short window of the last tokens is decoded, and what is new in its text counts:

    window   t1 t2 t3 t4 t5 t6 | t7        decode(t1..t6) = "...house a", decode(t1..t7) = "...house and"
             seen before         new        -> "nd"

A window must not begin with what is new: tokenizers strip the space before the first word.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet one
_KEPT, _LONGEST = 6, 16  # tokens: a window of more than the second is cut down to the first
_LONG_RUN = 24  # tokens


class TokenText:
    """The text of one growing list of tokens; equal to `tokenizer.decode` of all of them, piece by piece."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._vocabulary = _vocabulary(tokenizer, skip_special_tokens, len(tokenizer))
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self._run = _ByteRun()

    def add(self, token_ids: Sequence[int]) -> str:
        """The new text that later tokens cannot change."""
        self._take(token_ids)
        count = len(self._window) - self._run.unsure
        text = self._vocabulary.decode(self._window[:count])
        new = self._new(text[: len(text) - self._unsure(text)])
        if count > _LONGEST:
            self._shorten(count)
        return new

    def finish(self) -> str:
        """The rest, whatever it is."""
        return self._new(self._vocabulary.decode(self._window))

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self._vocabulary.is_silent(token_id):
                self._window.append(token_id)
                self._run.add(self._vocabulary.byte_of(token_id))

    def _new(self, sure: str) -> str:
        new = sure[self._given :]
        self._given += len(new)
        return new

    def _unsure(self, text: str) -> int:
        """How many characters at the end of a text may still change."""
        if text.endswith(HALF):
            return 1
        if not self._vocabulary.cleans_up:
            return 0
        # Spaces before "n't" and the like are taken away, four characters at most.
        space = text.find(" ", max(0, len(text) - 3))
        return 0 if space < 0 else len(text) - space

    def _shorten(self, count: int) -> None:
        """Forget tokens whose text was given out. Of the first `count` so many must stay that a character which began
        before them has ended, and that there is some text: else the space of the next word would be taken for one
        before the first.
        """
        run = self._run.sure_end
        for kept in (run,) if run else (_KEPT, 2 * _KEPT):
            start = count - kept
            text = self._vocabulary.decode(self._window[start:count]) if start > 0 else ""
            if len(text) > 4 or (text and not self._vocabulary.cleans_up):
                self._window = self._window[start:]
                self._given = len(text) - self._unsure(text)
                return


class _ByteRun:
    """The tokens of single bytes at the end of a list, of tokenizers that fall back to bytes. Those make characters of
    a run only if the whole of it is right, so that none is sure before it ends. In scripts without tokens a run may be
    a whole text: of a long one what is right so far counts as sure.
    """

    def __init__(self) -> None:
        self._length = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_valid = True
        self._last = 0  # bytes of the last whole character

    def add(self, byte: int | None) -> None:
        """One more token: a byte, or None for any other, which ends the run."""
        if byte is None:
            self.__init__()  # type: ignore[misc]
            return
        self._length += 1
        if not self._is_valid:
            return
        try:
            text = self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._is_valid = False
            return
        self._last = len(text.encode()) or self._last

    @property
    def unsure(self) -> int:
        """How many tokens at the end of the list are not sure."""
        is_sure = self._is_valid and self._length >= _LONG_RUN
        return len(self._decoder.getstate()[0]) if is_sure else self._length

    @property
    def sure_end(self) -> int:
        """How many tokens the last sure character of a run has that goes on; 0 where there is no such."""
        return self._last if self.unsure < self._length else 0


class _Vocabulary:
    """What is asked of a tokenizer again and again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self.cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._size = len(tokenizer)
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._bytes: dict[int, int | None] = {}

    def decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips) if token_ids else ""
        return text

    def is_silent(self, token_id: int) -> bool:
        """Whether decode() passes over a token: a special one, or one that only the model knows."""
        return token_id in self._special or token_id >= self._size

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token such as <0xE4> stands for, where the tokenizer takes it for one."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._byte_of(token_id)
        return self._bytes[token_id]

    def _byte_of(self, token_id: int) -> int | None:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token or "")
        return int(match[1], 16) if match and self.decode([token_id]) != token else None


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Those that decode(skip_special_tokens=True) leaves out: of a fast tokenizer all that were added as special."""
    if not tokenizer.is_fast:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool, size: int) -> _Vocabulary:
    """Kept for the next sequence, as long as no token is added."""
    return _Vocabulary(tokenizer, skip_special_tokens)
