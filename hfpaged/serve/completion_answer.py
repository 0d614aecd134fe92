"""Answers of /v1/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from hfpaged.engine.call import Call, Submission
from hfpaged.engine.delivery import StreamEvent
from hfpaged.engine.outputs import RequestOutput, SequenceOutput
from hfpaged.serve.answers import answer_head, new_id, stop_reason
from hfpaged.serve.body_prompt import prompt_of_text
from hfpaged.serve.chunks import Chunks, check_ended
from hfpaged.serve.grammar import grammar_of
from hfpaged.serve.grammar_processor import grammar_processor, with_end
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.logprob_text import CompletionLogprobs, TokenTexts
from hfpaged.serve.sampling import eos_token_ids, new_tokens, sampling_settings
from hfpaged.serve.schemas.completion import CompletionBody
from hfpaged.serve.service import Service
from hfpaged.serve.usage import usage_of


class CompletionAnswer:
    """Of one request. `submissions` comes first, in a thread; then `whole` or `chunks`."""

    def __init__(self, body: CompletionBody, service: Service) -> None:
        if body.suffix:
            raise ApiError(400, "suffix is for models that fill in the middle, which this server does not; leave it "
                           "out", code="unsupported", param="suffix")  # fmt: skip
        self.body, self._service = body, service
        self.id = new_id("cmpl")
        self.has_new = body.max_tokens != 0  # else one is made, as a step makes one, and not told
        self.own_ends = eos_token_ids(service.batcher.model.generation_config)
        self.texts = TokenTexts(service.batcher.tokenizer, bool(body.return_tokens_as_token_ids))
        self.hides_special = body.skip_special_tokens is not False
        self.echoed: list[str] = []  # texts of the prompts, where they come first
        self._head = answer_head(self.id, "text_completion", body, service)

    def submissions(self) -> Iterable[Submission]:
        """Raises ApiError."""
        settings = sampling_settings(self.body, self._service)
        if self.body.logprobs is not None:
            settings["logprobs"] = self.body.logprobs
            if self.body.echo:
                settings["prompt_logprobs"] = self.body.logprobs
        if (grammar := grammar_of(self.body.formats)) is not None:
            tokenizer, model = self._service.tokenizer, self._service.batcher.model
            settings["logits_processor"] = grammar_processor(tokenizer, model, grammar)
            settings = with_end(settings, tokenizer, model)
        for index, prompt in enumerate(self.body.prompt):
            token_ids = prompt_of_text(prompt, self.body, lambda: self._service.tokenizer)
            if self.body.echo:
                self.echoed.append(self._text(prompt))
            asked = max(self.body.max_tokens, 1) if self.body.max_tokens is not None else None
            length = new_tokens(self._service, asked, len(token_ids))
            yield Submission(token_ids, settings | {"max_tokens": length, "request_id": f"{self.id}-{index}"})

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Raises ApiError where a request was given up."""
        for output in outputs:
            check_ended(output)
        choices = [
            self._choice(output, seq, position * self.n + rank, self.echoed[position] if self.body.echo else "")
            for position, output in enumerate(outputs)
            for rank, seq in enumerate(output.sequences)
        ]
        return {**self._head, "choices": choices, "usage": usage_of(outputs, counts_new=self.has_new)}

    def chunks(self, call: Call) -> AsyncGenerator[bytes]:
        """Raises ApiError where a request fails or is given up."""
        return _CompletionChunks(self, self._head)(call)

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.body.n or 1

    def _choice(self, output: RequestOutput, seq: SequenceOutput, index: int, prompt: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": prompt + (seq.text or "" if self.has_new else ""),
            "logprobs": self._logprobs(output, seq, prompt),
            "finish_reason": seq.finish_reason if self.has_new else "length",
            "stop_reason": stop_reason(seq, self.own_ends) if self.has_new else None,
        } | self._ids(output, seq)

    def _logprobs(self, output: RequestOutput, seq: SequenceOutput, prompt: str) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        found, parts = CompletionLogprobs(self.texts), []
        if self.body.echo:
            parts.append(found.of(output.prompt_token_ids, output.prompt_logprobs or (), prompt=prompt))
        token_ids = seq.token_ids if self.has_new else []
        positions = seq.logprobs or () if self.has_new else ()
        parts.append(found.of(token_ids, positions, hides_special=self.hides_special))
        return {name: [each for part in parts for each in part[name]] for name in parts[-1]}

    def _ids(self, output: RequestOutput, seq: SequenceOutput) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": output.prompt_token_ids, "token_ids": seq.token_ids if self.has_new else []}

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)


class _CompletionChunks(Chunks):
    def __init__(self, answer: CompletionAnswer, head: dict[str, Any]) -> None:
        super().__init__(head, answer.n, answer.body.stream_options, counts_new=answer.has_new)
        self._answer = answer
        self._is_plain = answer.body.logprobs is None and not answer.body.return_token_ids
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._told: dict[int, int] = {}  # tokens whose logprobs have been sent, by choice

    def choices(self, index: int, new: StreamEvent) -> Iterator[bytes]:
        """A choice that begins has its prompt before it, where that is echoed."""
        if index not in self._begun:
            self._begun.add(index)
            if self._answer.body.echo:
                yield self._prompt(index, new.output)
        text = (new.text or "") if self._answer.has_new else ""
        if self._is_plain and new.finish_reason is None:
            if text:
                yield b'{"index":%d,"text":' % index + json_bytes(text) + b',"logprobs":null,"finish_reason":null}'
        elif text or new.finish_reason is not None or self._answer.body.return_token_ids:
            yield self._piece(index, text, new)

    def _prompt(self, index: int, output: RequestOutput) -> bytes:
        prompt = self._answer.echoed[index // self._answer.n]
        choice: dict[str, Any] = {"index": index, "text": prompt}
        found = None
        if self._answer.body.logprobs is not None:
            found = self._logprobs_of(index).of(output.prompt_token_ids, output.prompt_logprobs or (), prompt=prompt)
        return json_bytes(choice | {"logprobs": found, "finish_reason": None})

    def _piece(self, index: int, text: str, new: StreamEvent) -> bytes:
        seq = next(seq for seq in new.output.sequences if seq.index == new.index)
        has_new, found, reason = self._answer.has_new, None, new.finish_reason
        if self._answer.body.logprobs is not None and has_new:
            told = self._told.get(index, 0)
            positions = (seq.logprobs or ())[told:]
            hides_special = self._answer.hides_special
            found = self._logprobs_of(index).of(seq.tokens.tolist(told), positions, hides_special=hides_special)
            self._told[index] = told + len(positions)
        choice = {"index": index, "text": text, "logprobs": found}
        choice |= {"finish_reason": "length" if reason and not has_new else reason}
        if reason:
            choice["stop_reason"] = stop_reason(seq, self._answer.own_ends) if has_new else None
        if self._answer.body.return_token_ids:
            choice["token_ids"] = new.token_ids if has_new else []
        return json_bytes(choice)

    def _logprobs_of(self, index: int) -> CompletionLogprobs:
        return self._logprobs.setdefault(index, CompletionLogprobs(self._answer.texts))
