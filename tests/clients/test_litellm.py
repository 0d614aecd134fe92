"""litellm, which many agents and gateways speak through."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.demo_model,
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs litellm: pip install litellm"),
]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def litellm():
    """Its import takes seconds, and would ask the net for prices."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    return litellm


@pytest.fixture
def ask(product, litellm):
    def asked(**more):
        given = {
            "model": f"openai/{product.model}", "api_base": product.api, "api_key": product.key, "messages": ASKED,
            "temperature": 0, "max_tokens": 12, "max_retries": 0,
        }  # fmt: skip
        return litellm.completion(**{**given, **more})

    return asked


def test_a_completion_has_the_text_of_plain_transformers_and_its_usage(ask, product, plain):
    answer = ask()
    assert answer.choices[0].message.content == plain(ASKED, 12)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == product.model
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = ask().usage
    assert (again.prompt_tokens, again.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert 0 < again.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_a_stream_adds_up_to_the_whole_answer(ask, litellm):
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > whole.usage.completion_tokens  # each token by itself
    added = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert added.choices[0].message.content == whole.choices[0].message.content
    assert added.choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_is_called_with_arguments_that_fit(ask, litellm, stream):
    forced = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(tools=[WEATHER], tool_choice=forced, max_tokens=64, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=ASKED)
    (call,) = answer.choices[0].message.tool_calls
    assert call.id
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = ask(messages=[*ASKED, answer.choices[0].message.model_dump(), result], tools=[WEATHER])
    assert after.choices[0].message.content


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"api_key": "nobody's"}, "AuthenticationError"),
        ({"model": "openai/nothing"}, "NotFoundError"),
        ({"top_p": 7}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": "much " * 4000}]}, "ContextWindowExceededError"),
    ],
)
def test_its_errors_are_those_that_its_users_catch(ask, litellm, more, kind):
    with pytest.raises(getattr(litellm, kind)):
        ask(**more)
