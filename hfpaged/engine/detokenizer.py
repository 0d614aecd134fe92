"""The text of a sequence while it grows: only what is sure, and nothing of a string that stops it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hfpaged.engine.stop_strings import first_stop, may_become_stop
from hfpaged.engine.token_text import TokenText


class Detokenizer:
    """Text piece by piece. Together the pieces are what the tokenizer makes of all tokens at once, up to the stop
    string that is complete first (with it if `include_stop`). Of one thing they are more: where 24 and more tokens of
    single bytes turn out to be no text, the characters that they began with stay.

    text         all pieces so far
    stopped_by   the stop string that was found; after it nothing more comes
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = TokenText(tokenizer, skip_special_tokens)
        self._stop, self._include_stop = tuple(stop), include_stop
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is sure now: no half characters, and nothing that may still become a stop string."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._decoder.add(token_ids), is_last=False)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._decoder.finish(), is_last=True)

    def _release(self, new: str, is_last: bool) -> str:
        text = self._held + new
        found = first_stop(text, self._stop)
        if found is not None:
            self.stopped_by = self._stop[found.which]
            end = found.end if self._include_stop else found.start
        else:
            end = len(text) - (0 if is_last else may_become_stop(text, self._stop))
        self._held = text[end:] if found is None else ""
        self.text += text[:end]
        return text[:end]
