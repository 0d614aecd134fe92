"""Answers of tokenizers that say themselves how to read them (`response_template`): by transformers' own parser."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.serve.delimiters import Delimited
from hfpaged.serve.prose import Piece, Prose, ToolCall, joined, new_id

logger = logging.getLogger("hfpaged")

# transformers' word for it, and those of some tokenizers.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class HostParser:
    """Fed with text that has its special tokens. What it fails at comes back as content, and so does all behind it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_text: str, tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        given = [dict(tool) for tool in tools] if tools else None
        self._make: Callable[[], Any] = lambda: tokenizer.get_response_parser(prefix=prompt_text, tools=given)
        self._silent = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._plain_text = Delimited()  # behind what could not be read
        self._parser, self._reader = self._make(), _Reader()
        self._text = ""
        self._told = [0, 0, 0]  # characters of content and of reasoning, calls

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._pieces(lambda parser: parser.feed(text), text, is_last=False)

    def end(self) -> list[Piece]:
        return self._pieces(lambda parser: parser.finalize()[1], "", is_last=True)

    def _pieces(self, work: Callable[[Any], list[dict[str, Any]]], text: str, *, is_last: bool) -> list[Piece]:
        if self._parser is None:
            return self._tell(self._reader.plain(self._plain(text, is_last), is_last))
        try:
            return self._tell([*self._reader.pieces(work(self._parser)), *self._reader.plain("", is_last)])
        except Exception as error:  # of templates that anybody may have written
            logger.debug("transformers' parser gave up on an answer", exc_info=error)
            self._parser = None
            return self._tell(self._untold(is_last))

    def _tell(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            for index, count in enumerate((len(piece.content), len(piece.reasoning), piece.call is not None)):
                self._told[index] += count
        return joined(pieces)

    def _untold(self, is_last: bool) -> list[Piece]:
        """What has not been told of the text so far. The events before the one that failed are lost, so that another
        parser is given the text by characters, up to the one that it fails at.
        """
        parser, self._reader, found = self._make(), _Reader(), []
        place = start = 0  # of the character, and of what is told as it is if this one fails
        try:
            while place < len(self._text):
                found += self._reader.pieces(parser.feed(self._text[place]))
                place += 1
                if not self._reader.in_call:
                    start = place
                elif start == place - 1:
                    start = place - len(self._reader.raw)
            found += self._reader.pieces(parser.finalize()[1])
        except Exception:
            self._reader.give_up_call()
            found += self._reader.plain(self._plain(self._text[start:], is_last), is_last)
        content, reasoning, calls = self._told
        all_calls = [piece for piece in found if piece.call is not None]
        return [
            Piece(reasoning="".join(piece.reasoning for piece in found)[reasoning:]),
            *all_calls[calls:],
            Piece(content="".join(piece.content for piece in found)[content:]),
        ]

    def _plain(self, text: str, is_last: bool) -> str:
        """Without special tokens."""
        self._plain_text.feed(text)
        found, delimiter = self._plain_text.take(self._silent, is_last=is_last)
        while delimiter is not None:
            more, delimiter = self._plain_text.take(self._silent, is_last=is_last)
            found += more
        return found


class _Reader:
    """From the events of transformers' parser to pieces."""

    def __init__(self) -> None:
        self._content, self._thought = Prose(), Prose(strips=True)
        self.in_call, self.raw = False, ""  # what has come of the call under way

    def pieces(self, events: list[dict[str, Any]]) -> list[Piece]:
        return [piece for event in events for piece in self._read(event)]

    def plain(self, text: str, is_last: bool) -> list[Piece]:
        content = self._content.add(text) if text else ""
        return [Piece(content=content + (self._content.finish() if is_last else ""))]

    def give_up_call(self) -> None:
        """What has come of it is text."""
        if self.in_call:
            self._content.uncut()
        self.in_call = False

    def _read(self, event: Mapping[str, Any]) -> list[Piece]:
        kind, field, text = event["type"], event.get("field"), event.get("text") or ""
        if field == "tool_calls":
            return self._read_call(kind, text, event.get("value"))
        if field in _REASONING and kind == "region_open":
            self._content.cut()
        if kind != "region_chunk" or event.get("dirty"):
            return []
        if field in _REASONING:
            return [Piece(reasoning=self._thought.add(text))]
        return [Piece(content=self._content.add(text))] if field == "content" else []

    def _read_call(self, kind: str, text: str, value: Any) -> list[Piece]:
        if kind == "region_open":
            self._content.cut()
            self.in_call, self.raw = True, ""
        elif kind == "region_chunk":
            self.raw += text
        else:
            found = [Piece(call=_call(item)) for item in (value if isinstance(value, list) else [value])]
            self.in_call = False
            return found
        return []


def _call(value: Any) -> ToolCall:
    """Raises what a value that is no call makes it raise."""
    function = value.get("function", value)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(json.loads(text), dict):
        raise ValueError("arguments are no object")
    return ToolCall(new_id(), function["name"], text)
