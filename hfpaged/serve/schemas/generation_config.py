"""`generation_config` of a request: `transformers chat` says by it what others have fields for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
_FIELDS |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}


def _parsed(value: Any) -> dict[str, Any] | None:
    """Raises ValueError."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = value
    if found is not None and not isinstance(found, dict):
        raise ValueError("must be an object, or the JSON text of one")
    return found


GivenConfig = Annotated[
    dict[str, Any] | None,
    PlainValidator(_parsed),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "examples": ["{}"]}, {"type": "null"}]}),
]


def heeding_config(body: Any) -> Any:
    """The body, with what its generation_config says in the fields that it left out."""
    given = body.get("generation_config") if isinstance(body, Mapping) else None
    try:
        config = _parsed(given)
    except ValueError:  # which the field itself will tell
        return body
    if not config:
        return body
    said = {name: value for name, value in body.items() if value is not None}
    fields = _in_fields(config)
    if "max_completion_tokens" in said:
        fields.pop("max_tokens", None)
    return {**body, **fields, **said}


def _in_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What has no field is left out, as unknown fields are."""
    found = {_FIELDS[name]: value for name, value in config.items() if name in _FIELDS and value is not None}
    if config.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    elif config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
