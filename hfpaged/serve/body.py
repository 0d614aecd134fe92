"""The body of a request: read before anybody parses it, as far as it may be long."""

from __future__ import annotations

import json
import re

import anyio
from starlette.types import Message, Receive, Scope

from hfpaged.serve.http_errors import ApiError

# A client that sends its whole request before it reads would not see why it was refused if the connection were closed
# at once, so as much as this is read and dropped.
DISCARDED = 16 << 20

# Pairs of escaped surrogates, which make a character, and in the group those that stand alone. Of several backslashes
# each second one belongs to the one before it.
_HALVES = re.compile(rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..))")

_EMPTY: Message = {"type": "http.request", "body": b"", "more_body": False}


async def read_body(scope: Scope, receive: Receive, limit: int, seconds: float) -> Message | None:
    """All of it, as one message; None where the client went before. Raises ApiError 413 for one of more than `limit`
    bytes, 408 for one that takes longer than `seconds`, 400 for lengths that are none.
    """
    headers = dict(scope["headers"])
    length = _length(headers.get(b"content-length"))
    is_framed = scope.get("http_version", "1.1") in ("1.0", "1.1")  # later versions know the end without a header
    if length == 0 or (is_framed and length is None and b"transfer-encoding" not in headers):
        return _EMPTY
    if length is not None and length > limit and (length > limit + DISCARDED or b"expect" in headers):
        raise too_large(limit, closes=True)
    try:
        with anyio.fail_after(seconds):
            return await _read(receive, limit)
    except TimeoutError:
        raise ApiError(
            408, f"the request was not sent whole within {seconds:g} seconds, which is this server's limit "
            "(--send-timeout)", code="request_timeout", headers={"Connection": "close"},
        ) from None  # fmt: skip


async def _read(receive: Receive, limit: int) -> Message | None:
    parts: list[bytes] = []
    size, is_whole = 0, False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if size > limit + DISCARDED and not is_whole:
            raise too_large(limit, closes=True)
        if size <= limit:
            parts.append(message.get("body", b""))
        else:
            parts.clear()
    if size > limit:
        raise too_large(limit, closes=False)
    body = b"".join(parts)
    _check_characters(body)
    return {"type": "http.request", "body": body, "more_body": False}


def _check_characters(body: bytes) -> None:
    """JSON can write half of a character, and no tokenizer, no answer and no key can hold it; so could other encodings
    that Python guesses at, and bytes that it lets pass. Raises ApiError 400.
    """
    try:
        body.decode()
        is_utf8 = 0 not in body[:4]
    except UnicodeDecodeError:
        is_utf8 = False
    if not is_utf8:
        raise ApiError(400, "the body is not UTF-8, which JSON is sent in; encode it so", code="invalid_json")
    found = next((match for match in _HALVES.finditer(body) if match[1]), None)
    if found is not None and _has_half_characters(body):
        raise ApiError(
            400, f"the body has {found[1].decode()}, which is half of a character; send both halves, or neither",
            code="invalid_json",
        )  # fmt: skip


def _has_half_characters(body: bytes) -> bool:
    """Whether its texts cannot be written as UTF-8. What is no JSON has no texts: whoever parses it tells what is wrong
    with it.
    """
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def replayed(message: Message, receive: Receive) -> Receive:
    """Gives `message` first, then what comes behind it: that the client has gone."""
    waiting = [message]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def too_large(limit: int, *, closes: bool) -> ApiError:
    return ApiError(
        413, f"the body is longer than {limit} bytes, which is this server's limit (--max-request-bytes)",
        code="request_too_large", headers={"Connection": "close"} if closes else {},
    )  # fmt: skip


def _length(given: bytes | None) -> int | None:
    if given is None:
        return None
    if not given.isdigit():
        raise ApiError(400, "Content-Length is no number of bytes", code="invalid_header")
    return int(given)
