"""What a request wants its answer to look like, as a grammar: JSON, JSON of a schema, a regular expression, a choice.

Grammars are llguidance's. Of the three libraries that are kept up it is the one that adds nothing else to an
installation (xgrammar wants torch, transformers, triton and tvm-ffi, and a wheel for each Python; outlines wants
diskcache and pillow among others), and that makes nothing in advance: a schema is read in a millisecond, and which
tokens may come is found out step by step, where outlines first makes an automaton over the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hfpaged.serve.http_errors import ApiError, invalid

# As much white space as people indent with. A model that may go on with spaces for ever sometimes does.
JSON_OPTIONS = {"whitespace_pattern": r"\n?[\x20\t]{1,16}|\n"}
# llguidance works on a schema with much more for minutes: its time grows with the square of what lies side by side.
MOST_PARTS, MOST_LEVELS, MOST_GRAMMAR = 1000, 100, 1 << 16
_PARTS = ("properties", "patternProperties", "required", "anyOf", "oneOf", "allOf")
_REMEDY = "pip install 'hfpaged[serve]'"
# vLLM's names: those of the fields of `structured_outputs`, and the older guided_*.
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def llguidance() -> Any:
    """The library. Raises ApiError 422 where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ApiError(
            422, f"this server cannot hold answers to a format, as llguidance is not installed on it: {_REMEDY}",
            code="no_grammar_library", param="response_format",
        ) from error  # fmt: skip
    return llguidance


def grammar_of(fields: Mapping[str, Any]) -> str | None:
    """The grammar that a request's fields ask for: `response_format`, or vLLM's `structured_outputs` and `guided_*`.
    None where the answer is free. Raises ApiError 400 for what is no format, and where several are asked for.
    """
    asked = {name: value for name, value in _asked(fields).items() if value is not None}
    if len(asked) > 1:
        raise invalid(f"an answer has one format, and this request asks for {len(asked)}: {', '.join(asked)}",
                       next(iter(asked)))  # fmt: skip
    for name, value in asked.items():
        return response_format_grammar(value, name) if name == "response_format" else _grammar(name, value)
    return None


def response_format_grammar(given: Any, param: str = "response_format") -> str | None:
    """The grammar of OpenAI's {"type": "text" | "json_object" | "json_schema", ...}; None for text.

    Raises ApiError 400.
    """
    kind = given.get("type") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise invalid(f"{param}.type is {kind!r}; use text, json_object or json_schema", param)
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    inner = given.get("json_schema", given)  # /v1/responses has no level between
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid(f"{param} of type json_schema needs a `schema` that is an object", param)
    check_size(schema, param)
    return json_grammar(schema)


def check_size(schema: Any, param: str) -> None:
    """Raises ApiError 400 for a schema that would take long to read."""
    left = [(schema, 1)]
    while left:
        value, level = left.pop()
        if level > MOST_LEVELS:
            raise invalid(f"{param} has more than {MOST_LEVELS} levels; make it flatter", param)
        if isinstance(value, Mapping):
            for name in _PARTS:
                part = value.get(name)
                if isinstance(part, (Mapping, list)) and len(part) > MOST_PARTS:
                    raise invalid(f"{name} of a schema in {param} has {len(part)} entries, and may have {MOST_PARTS}; "
                                   "use fewer", param)  # fmt: skip
            left += [(part, level + 1) for part in value.values()]
        elif isinstance(value, list):
            left += [(part, level + 1) for part in value]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """That of JSON which fits a schema."""
    return str(llguidance().LLMatcher.grammar_from_json_schema(dict(schema), overrides=JSON_OPTIONS))


def json_rule(schema: Mapping[str, Any]) -> str:
    """The same as a part of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def lark_grammar(lark: str) -> str:
    """That of rules in llguidance's dialect of Lark."""
    return str(llguidance().LLMatcher.grammar_from_lark(lark))


def _asked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All formats that are asked for, by the names under which that was done."""
    found = {"response_format": fields.get("response_format")}
    if isinstance(found["response_format"], Mapping) and found["response_format"].get("type") == "text":
        found = {}
    nested = fields.get("structured_outputs")
    if not (nested is None or isinstance(nested, Mapping)):
        raise invalid("structured_outputs is an object", "structured_outputs")
    found |= {f"guided_{kind}": fields.get(f"guided_{kind}") for kind in _KINDS}
    found |= {f"structured_outputs.{kind}": (nested or {}).get(kind) for kind in _KINDS}
    for name in ("guided_json_object", "structured_outputs.json_object"):
        found[name] = found[name] or None  # false: not asked for
    return found


def _grammar(name: str, value: Any) -> str:
    """That of one of vLLM's fields. Raises ApiError 400."""
    kind = name.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind == "json":
        return json_grammar(_schema(name, value))
    if kind == "choice":
        return lark_grammar(_choice(name, value))
    if not isinstance(value, str):
        raise invalid(f"{name} is text, not {type(value).__name__}", name)
    if len(value) > MOST_GRAMMAR:
        raise invalid(f"{name} has {len(value)} characters, and may have {MOST_GRAMMAR}; make it shorter", name)
    if kind == "regex":
        return str(llguidance().LLMatcher.grammar_from_regex(value))
    return lark_grammar(value)


def _schema(name: str, value: Any) -> Mapping[str, Any]:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is no JSON: {error}", name) from error
    if not isinstance(schema, Mapping):
        raise invalid(f"{name} is a JSON schema, an object, not {type(schema).__name__}", name)
    check_size(schema, name)
    return schema


def _choice(name: str, value: Any) -> str:
    is_texts = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value)
    if not is_texts or not value:
        raise invalid(f"{name} is a list of one or more texts", name)
    # A terminal, and not rules, of which only some 2000 can be followed at once.
    options = " | ".join(json.dumps(text, ensure_ascii=False) for text in value if text)
    if "" in value:
        return "start: CHOICE?\nCHOICE: " + options if options else 'start: ""'
    return "start: CHOICE\nCHOICE: " + options
