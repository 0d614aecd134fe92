"""What is wrong with a body that is no request, in words for whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from hfpaged.serve.http_errors import ApiError

_SHOWN = 80  # characters of what was sent


def invalid_body(error: RequestValidationError) -> ApiError:
    """400 for the first field that is wrong: its name as clients write it, and what it should be."""
    first = error.errors()[0]
    kind, place = first["type"], [part for part in first["loc"] if part not in ("body", "query", "path")]
    if kind == "json_invalid":
        why = first.get("ctx", {}).get("error", "it ends too early")
        return ApiError(400, f"the body is no JSON: {why} (at character {place[0]})", code="invalid_json")
    if not place:
        return ApiError(
            400, "the body must be a JSON object; send one, with the header Content-Type: application/json",
            code="invalid_body",
        )  # fmt: skip
    param = _name(place)
    if kind == "missing":
        return ApiError(400, f"{param} is missing, and this endpoint needs it", code="missing_field", param=param)
    return ApiError(400, f"{param} {_rule(first)}, and it is {_shown(first['input'])}", code="invalid_value",
                    param=param)  # fmt: skip


def _name(place: Sequence[Any]) -> str:
    """messages[0].content for ("messages", 0, "content")."""
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def _rule(first: dict[str, Any]) -> str:
    """pydantic begins with "Input should", a validator of our own with "Value error, must"."""
    text = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return text.replace("should have", "must have").replace("should be", "must be")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
