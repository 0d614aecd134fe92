"""Fields that ask for a format of the answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from hfpaged.serve.schemas.sampling import Body

_FORMATS = [
    {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
    {
        "type": "object",
        "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
        },
        "required": ["type", "json_schema"],
    },
    {"type": "null"},
]
ResponseFormat = Annotated[Any, WithJsonSchema({"anyOf": _FORMATS})]
_Outputs = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]


class FormatBody(Body):
    """vLLM's guided_json, guided_regex, guided_choice and guided_grammar are known too."""

    response_format: ResponseFormat = Field(None, description="JSON, or JSON of a schema, that the answer must be.")
    structured_outputs: _Outputs = Field(None, description="One of json, json_object, regex, choice and grammar.")

    @property
    def formats(self) -> dict[str, Any]:
        """All fields that may ask for one."""
        return {
            **(self.model_extra or {}),
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
