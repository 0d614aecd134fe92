"""One line of a trace as a request, by the names that hfpaged, Mooncake and others give its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hfpaged.planner.trace import TraceRequest, TraceStep

MOST_TOKENS = 10_000_000  # of one request: beyond any context there is, and a line must not fill the memory
MOST_SEQUENCES = 1024

_PROMPT = ("prompt_tokens", "input_length", "prompt_len", "prompt_length", "input_len", "input_tokens")
_OUTPUT = ("output_tokens", "output_length", "output_len", "completion_tokens", "generated_tokens")
_HASHES = ("hashes", "hash_ids", "block_hashes")
_SECONDS = ("arrival", "arrival_time", "arrived_at")
_MILLISECONDS = ("timestamp",)  # as Mooncake's traces have it

EXPECTED = (
    'one JSON object a line with "arrival" (seconds) or "timestamp" (milliseconds), "prompt_tokens" or '
    '"input_length", "output_tokens" or "output_length", and if known "hashes" or "hash_ids", such as '
    '{"arrival": 0.5, "prompt_tokens": 512, "output_tokens": 64}'
)


class UnreadableLineError(ValueError):
    """Why a line is no request; it is counted and passed by."""


def request_of(line: Mapping[str, Any], chunk: int) -> TraceRequest:
    """The request of one line, whose hashes stand for `chunk` tokens each. Raises UnreadableLineError."""
    prompt = _count(line, _PROMPT, 1)
    hashes = _hashes(line, _HASHES)
    if len(hashes) > -(-prompt // chunk):
        raise UnreadableLineError(
            f"it has {len(hashes)} hashes of {chunk} tokens, and its prompt of {prompt} tokens {-(-prompt // chunk)}"
        )
    output = _count(line, _OUTPUT, 0)
    answer = _hashes(line, ("answer_hashes",)) if len(hashes) == prompt // chunk else ()
    return TraceRequest(
        arrival=_arrival(line),
        prompt_tokens=prompt,
        output_tokens=output,
        hashes=hashes,
        answer_hashes=answer[: (prompt + output) // chunk - len(hashes)],
        tenant=_optional(line, "tenant", 0, 0),
        n=_optional(line, "n", 1, 1, MOST_SEQUENCES),
        priority=_optional(line, "priority", 0, -(2**31)),
        adapter=_optional(line, "adapter", 0, 0),
        hits=_optional(line, "hits", None, 0),
        finish=str(line["finish"]) if line.get("finish") is not None else None,
        ttft=_seconds(line, "ttft"),
        duration=_seconds(line, "duration"),
        like=_like(line, chunk),
    )


def step_of(line: Mapping[str, Any]) -> TraceStep:
    """The step of one line. Raises UnreadableLineError."""
    seconds = _seconds(line, "seconds")
    if seconds is None:
        raise UnreadableLineError('a step without "seconds"')
    prefill, decodes, context = (_count(line, (name,), 0, 2**60) for name in ("prefill", "decodes", "context"))
    return TraceStep(prefill, decodes, context, seconds)


def _arrival(line: Mapping[str, Any]) -> float:
    for names, unit in ((_SECONDS, 1.0), (_MILLISECONDS, 1000.0)):
        for name in names:
            if name in line:
                return number(name, line[name]) / unit
    raise UnreadableLineError(f"it does not say when the request came: none of {_listed(_SECONDS + _MILLISECONDS)}")


def _count(line: Mapping[str, Any], names: tuple[str, ...], least: int, most: int = MOST_TOKENS) -> int:
    for name in names:
        if name in line:
            return whole(name, line[name], least, most)
    raise UnreadableLineError(f"none of {_listed(names)} is in it")


def _optional(line: Mapping[str, Any], name: str, default: Any, least: int, most: int = 2**31) -> Any:
    value = line.get(name)
    return default if value is None else whole(name, value, least, most)


def whole(name: str, value: object, least: int, most: int) -> int:
    """`value` as a whole number from `least` to `most`. Raises UnreadableLineError."""
    count = value if type(value) is int else number(name, value)
    if count != int(count) or not least <= count <= most:
        raise UnreadableLineError(f'"{name}" is {_short(value)}, no whole number from {least} to {most}')
    return int(count)


def number(name: str, value: object) -> float:
    """`value` as a finite number. Raises UnreadableLineError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise UnreadableLineError(f'"{name}" is {_short(value)}, no number')


def _seconds(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    seconds = number(name, value)
    if seconds < 0:
        raise UnreadableLineError(f'"{name}" is {_short(value)}, less than no time')
    return seconds


def _hashes(line: Mapping[str, Any], names: tuple[str, ...]) -> tuple[int, ...]:
    for name in names:
        value = line.get(name)
        if value is None:
            continue
        numbers = _numbers(value)
        if numbers is None:
            raise UnreadableLineError(
                f'"{name}" is {_short(value)}, no list of whole numbers or of texts in hexadecimal'
            )
        return numbers
    return ()


def _numbers(value: Any) -> tuple[int, ...] | None:
    """None where it is no list of whole numbers or of texts in hexadecimal."""
    try:
        return tuple([item if type(item) is int else int(item, 16) for item in value]) if type(value) is list else None
    except (TypeError, ValueError):
        return None


def _like(line: Mapping[str, Any], chunk: int) -> tuple[int, int, int] | None:
    value = line.get("like")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise UnreadableLineError(f'"like" is {_short(value)}, no list of a place, a hash and a number of tokens')
    ((other,),) = [_hashes({"like": [value[1]]}, ("like",))]
    return whole("like", value[0], 0, MOST_TOKENS), other, whole("like", value[2], 1, chunk)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)
