"""What bodies may hold; those that are wrong all over are told of one fault."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hfpaged.serve.schemas.chat import ChatBody
from hfpaged.serve.schemas.completion import CompletionBody
from hfpaged.serve.schemas.kv import ExplainRequest
from hfpaged.serve.schemas.tokenize import DetokenizeBody, TokenizeBody

MANY = 500


@pytest.mark.parametrize(("schema", "body"), [
    (ChatBody, {"messages": [{}] * MANY}),
    (TokenizeBody, {"messages": [{}] * MANY}),
    (ExplainRequest, {"messages": [{}] * MANY}),
    (ExplainRequest, {"prompt": [""] * MANY}),
    (DetokenizeBody, {"tokens": [-1] * MANY}),
    (CompletionBody, {"prompt": [{}] * MANY}),
    (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
    (CompletionBody, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    (CompletionBody, {"prompt": "a", "logit_bias": {str(token): "x" for token in range(MANY)}}),
])  # fmt: skip
def test_of_many_faults_in_a_list_one_is_told(schema, body):
    """All of them would be told for seconds, of a body as long as it may be, and nobody else be answered meanwhile."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() <= 2


@pytest.mark.parametrize("bias", [{"1": True}, {"1": "2"}, {"1": None}, [1], "1", {"1": 10**400}])
def test_a_bias_is_a_number_for_each_token(bias):
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "a", "logit_bias": bias})
    assert caught.value.errors()[0]["loc"] == ("logit_bias",)


def test_biases_are_taken_as_numbers():
    body = CompletionBody.model_validate({"prompt": "a", "logit_bias": {"1": 2, "3": -0.5}})
    assert body.logit_bias == {"1": 2.0, "3": -0.5}
