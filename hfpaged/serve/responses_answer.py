"""Answers of /v1/responses, whole and as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hfpaged.engine.call import Call, Submission
from hfpaged.engine.outputs import RequestOutput
from hfpaged.serve.answer_plan import AnswerPlan, plan_answer
from hfpaged.serve.body_prompt import prompt_of_items
from hfpaged.serve.chunks import check_ended
from hfpaged.serve.event_stream import event
from hfpaged.serve.grammar import check_size
from hfpaged.serve.grammar_processor import with_end
from hfpaged.serve.http_errors import ApiError, api_error
from hfpaged.serve.prose import Piece
from hfpaged.serve.responses_output import Event, Output, new_id
from hfpaged.serve.sampling import new_tokens, sampling_settings
from hfpaged.serve.schemas.responses import ResponsesBody
from hfpaged.serve.service import Service
from hfpaged.serve.tool_choice import tool_choice_of
from hfpaged.serve.usage import usage_of

_REFUSED = ("previous_response_id", "conversation", "background")


class ResponsesAnswer:
    """Of one request. `submissions` comes first, in a thread; then `whole` or `events`."""

    fields: Mapping[str, str] = {"prompt": "input", "max_tokens": "max_output_tokens", "messages": "input"}

    def __init__(self, body: ResponsesBody, service: Service) -> None:
        self._body, self._service = body, service
        self.id, self._created = new_id("resp"), int(time.time())
        self._plan: AnswerPlan | None = None
        self._check()

    def submissions(self) -> Iterable[Submission]:
        """Raises ApiError."""
        body, service = self._body, self._service
        for name in ("text", "tools", "tool_choice"):  # which answers repeat
            check_size(getattr(body, name), name)
        settings = sampling_settings(body, service)
        choice = tool_choice_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        with _in_own_words():
            prompt = prompt_of_items(body, service.tokenizer, choice)
            self._plan = plan_answer(service, prompt, choice, self._formats)
        settings = with_end(settings | self._plan.settings, service.tokenizer, service.batcher.model)
        settings["max_tokens"] = new_tokens(service, body.max_output_tokens, len(prompt.token_ids))
        yield Submission(prompt.token_ids, settings | {"request_id": self.id})

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Raises ApiError where the request was given up."""
        (output,) = outputs
        check_ended(output)
        made = Output()
        for _ in [*made.events(self._pieces()(output.text or "", True)), *made.end(_status(output))]:
            pass
        return self._response(_status(output), made, output)

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Of a request that fails or is given up the last event says so."""
        numbers, made, pieces = iter(range(1 << 62)), Output(), self._pieces()

        def told(events: Iterable[Event]) -> bytes:
            return b"".join(event({**e, "sequence_number": next(numbers)}, e["type"]) for e in events)

        begun = self._response("in_progress", made)
        yield told({"type": f"response.{word}", "response": begun} for word in ("created", "in_progress"))
        try:
            async for arrival in call.arrivals():
                for new in arrival.events:
                    ends = new.finish_reason is not None
                    if ends:
                        check_ended(arrival.output)
                    if chunk := told(made.events(pieces(new.text or "", ends))):
                        yield chunk
                if arrival.output.finished:
                    status = _status(arrival.output)
                    rest = told(made.end(status))
                    response = self._response(status, made, arrival.output)
                    yield rest + told([{"type": f"response.{status}", "response": response}])
        except Exception as error:
            failed = self._response("failed", made) | {"error": _error(api_error(error))}
            yield told([{"type": "response.failed", "response": failed}])

    def _check(self) -> None:
        """Raises ApiError 400."""
        body = self._body
        for name in _REFUSED:
            if getattr(body, name) is not None and (name != "background" or body.background):
                raise ApiError(400, f"this server keeps no responses, so that {name} means nothing to it; send the "
                               "whole conversation as input", code="unsupported", param=name)  # fmt: skip
        if (body.n or 1) > 1 or (body.best_of or 1) > 1:
            raise ApiError(400, "a response is one answer; leave n and best_of out, or use /v1/chat/completions",
                           code="invalid_value", param="n")  # fmt: skip
        if not (body.text is None or isinstance(body.text, Mapping)):
            raise ApiError(400, "text is an object that may have a format", code="invalid_value", param="text")

    @property
    def _format(self) -> Any:
        return (self._body.text or {}).get("format")

    @property
    def _formats(self) -> dict[str, Any]:
        return {**(self._body.model_extra or {}), "response_format": self._format}

    def _pieces(self) -> Any:
        """A function of new text, and whether it is the last one."""
        pieces = self._plan.pieces(self._service) if self._plan is not None else None
        if pieces is None:
            return lambda text, is_last: [Piece(content=text)]
        return lambda text, is_last: pieces.new(text, is_last=is_last)

    def _response(self, status: str, made: Output, output: RequestOutput | None = None) -> dict[str, Any]:
        body = self._body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": cut, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "model": body.model or self._service.model_names[0],
            "output": list(made.items), "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
            "temperature": body.temperature, "text": {"format": self._format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "top_p": body.top_p,
            "truncation": "disabled", "usage": None if output is None else _usage(output),
        }  # fmt: skip


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason == "length" else "completed"


def _usage(output: RequestOutput) -> dict[str, Any]:
    found = usage_of([output])
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found["total_tokens"],
    }


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": "server_error", "message": error.message}


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Errors of what it shares with chat completions name this endpoint's fields."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        error.param = "text.format" if param == "response_format" else param.replace("messages", "input", 1) or None
        raise
