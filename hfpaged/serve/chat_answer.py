"""Answers of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from hfpaged.engine.call import Call, Submission
from hfpaged.engine.delivery import StreamEvent
from hfpaged.engine.outputs import RequestOutput, SequenceOutput
from hfpaged.serve.answer_plan import AnswerPlan, Pieces, plan_answer
from hfpaged.serve.answers import answer_head, new_id, stop_reason
from hfpaged.serve.body_prompt import prompt_of_messages
from hfpaged.serve.chat_message import deltas_of, message_of
from hfpaged.serve.chunks import Chunks, check_ended
from hfpaged.serve.grammar_processor import with_end
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.logprob_text import TokenTexts, chat_logprobs
from hfpaged.serve.sampling import eos_token_ids, new_tokens, sampling_settings
from hfpaged.serve.schemas.chat import ChatBody
from hfpaged.serve.service import Service
from hfpaged.serve.tool_choice import tool_choice_of
from hfpaged.serve.usage import usage_of


class ChatAnswer:
    """Of one request. `submissions` comes first, in a thread; then `whole` or `chunks`."""

    def __init__(self, body: ChatBody, service: Service) -> None:
        self.body, self._service = body, service
        self.id = new_id("chatcmpl")
        self._plan: AnswerPlan | None = None
        self.own_ends = eos_token_ids(service.batcher.model.generation_config)
        self.texts = TokenTexts(service.batcher.tokenizer, bool(body.return_tokens_as_token_ids))
        self.num_logprobs = self._num_logprobs()
        self.asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens

    @property
    def fields(self) -> dict[str, str]:
        """The names that this request has for what it says by other ones than most."""
        length = "max_tokens" if self.body.max_tokens is not None else "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": length}

    def submissions(self) -> Iterable[Submission]:
        """Raises ApiError."""
        settings = sampling_settings(self.body, self._service)
        choice = tool_choice_of(self.body.tools, self.body.tool_choice, self.body.parallel_tool_calls)
        prompt = prompt_of_messages(self.body.messages, self.body, self._service.tokenizer, choice)
        self._plan = plan_answer(self._service, prompt, choice, self.body.formats)
        settings = with_end(settings | self._plan.settings, self._service.tokenizer, self._service.batcher.model)
        if self.num_logprobs is not None:
            settings["logprobs"] = self.num_logprobs
        settings["max_tokens"] = new_tokens(self._service, self.asked, len(prompt.token_ids))
        yield Submission(prompt.token_ids, settings | {"request_id": self.id})

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Raises ApiError where the request was given up."""
        (output,) = outputs
        check_ended(output)
        head = answer_head(self.id, "chat.completion", self.body, self._service)
        choices = [self._choice(index, seq) for index, seq in enumerate(output.sequences)]
        more = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
        return {**head, "choices": choices, "usage": usage_of(outputs), **more}

    def chunks(self, call: Call) -> AsyncGenerator[bytes]:
        """Raises ApiError where the request fails or is given up."""
        return _ChatChunks(self, answer_head(self.id, "chat.completion.chunk", self.body, self._service))(call)

    def pieces(self) -> Pieces | None:
        """What takes one choice apart, None where it is content and nothing else."""
        return self._plan.pieces(self._service) if self._plan is not None else None

    def _choice(self, index: int, seq: SequenceOutput) -> dict[str, Any]:
        message, finish_reason = message_of(self.pieces(), seq)
        return {
            "index": index,
            "message": message,
            "logprobs": None if self.num_logprobs is None else chat_logprobs(seq.logprobs or (), self.texts),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason(seq, self.own_ends),
        } | ({"token_ids": seq.token_ids} if self.body.return_token_ids else {})

    def _num_logprobs(self) -> int | None:
        """None: they are not asked for. Raises ApiError."""
        if self.body.logprobs:
            return self.body.top_logprobs or 0
        if self.body.top_logprobs:
            raise ApiError(400, "top_logprobs is for answers with logprobs; set logprobs to true, or leave it out",
                           code="invalid_value", param="top_logprobs")  # fmt: skip
        return None


class _ChatChunks(Chunks):
    def __init__(self, answer: ChatAnswer, head: dict[str, Any]) -> None:
        super().__init__(head, answer.body.n or 1, answer.body.stream_options)
        self._answer = answer
        self._is_plain = answer.num_logprobs is None and not answer.body.return_token_ids
        self._begun: set[int] = set()
        self._told: dict[int, int] = {}  # tokens whose logprobs have been sent, by choice
        self._pieces = {index: pieces for index in range(self._n) if (pieces := answer.pieces()) is not None}

    def choices(self, index: int, new: StreamEvent) -> Iterator[bytes]:
        """The first chunk of a choice has its role."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._choice(index, {"role": "assistant", "content": ""})
        if self._pieces:
            yield from self._taken_apart(index, new)
            return
        text = new.text or ""
        if self._is_plain and new.finish_reason is None:
            if text:
                yield (b'{"index":%d,"delta":{"content":' % index + json_bytes(text)
                       + b'},"logprobs":null,"finish_reason":null}')  # fmt: skip
        elif text or new.finish_reason is not None or self._answer.body.return_token_ids:
            yield self._piece(index, {"content": text} if text else {}, new)

    def _taken_apart(self, index: int, new: StreamEvent) -> Iterator[bytes]:
        """The last chunk of what is new has its logprobs, and how it ended."""
        ends = new.finish_reason is not None
        *deltas, last = deltas_of(self._pieces[index], new.text or "", ends) or [{}]
        for delta in deltas:
            yield self._choice(index, delta)
        if last or ends or not self._is_plain:
            yield self._piece(index, last, new)

    def _piece(self, index: int, delta: dict[str, Any], new: StreamEvent) -> bytes:
        seq = next(seq for seq in new.output.sequences if seq.index == new.index)
        more: dict[str, Any] = {}
        if self._answer.num_logprobs is not None:
            told = self._told.get(index, 0)
            positions = (seq.logprobs or ())[told:]
            self._told[index] = told + len(positions)
            more["logprobs"] = chat_logprobs(positions, self._answer.texts)
        if new.finish_reason is not None:
            pieces = self._pieces.get(index)
            reason = pieces.finish_reason(new.finish_reason) if pieces else new.finish_reason
            more |= {"finish_reason": reason, "stop_reason": stop_reason(seq, self._answer.own_ends)}
        if self._answer.body.return_token_ids:
            more["token_ids"] = new.token_ids
        return self._choice(index, delta, **more)

    def _choice(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        return json_bytes({"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more)
