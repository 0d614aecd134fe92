"""Tools, formats and thoughts of /v1/chat/completions, as the openai client sees them."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
import tiny_models
import tiny_tokenizers
from served import served
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.serve import answer_plan
from hfpaged.serve.tool_families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS},
}
NOW = {"type": "function", "function": {"name": "now"}}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string"}, "country": {"type": "string"}},
    "required": ["capital", "country"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo_server(demo):
    model, tokenizer = demo
    with ContinuousBatcher(model, tokenizer, num_blocks=300, prepack=False) as batcher, served(batcher) as server:
        yield server
    hfpaged.unpatch(model)


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def from_stream(stream):
    """(content, reasoning, calls, finish reason), put together as clients do it."""
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.id.startswith("call_") or len(call.id) == 9
                calls[call.index] = (call.function.name, call.function.arguments)
            reason = choice.finish_reason or reason
    return content, reasoning, list(calls.values()), reason


def of_message(choice):
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", reasoning, calls, choice.finish_reason


@pytest.mark.demo_model
def test_the_demo_model_calls_a_tool_that_it_must_call_and_reads_its_result(demo_server):
    client = client_of(demo_server)
    asked = {"messages": ASKED, "tools": [WEATHER, NOW], "temperature": 0}
    named = {"type": "function", "function": {"name": "get_weather"}}
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, **asked, tool_choice=named)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    streamed = client.chat.completions.create(model=model, **asked, tool_choice=named, stream=True)
    assert from_stream(streamed) == of_message(choice)
    history = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"}]
    said = client.chat.completions.create(model=model, messages=history, tools=[WEATHER], temperature=0, max_tokens=40)
    assert "21" in said.choices[0].message.content


@pytest.mark.demo_model
def test_the_demo_model_answers_in_a_schema(demo_server):
    client = client_of(demo_server)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in JSON: capital, country."}]
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    arguments = {"model": client.models.list().data[0].id, "messages": messages, "response_format": wanted,
                 "temperature": 0}  # fmt: skip
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content)["capital"] == "Paris"
    assert from_stream(client.chat.completions.create(**arguments, stream=True)) == of_message(answer.choices[0])
    several = client.chat.completions.create(**{**arguments, "temperature": 1.2}, n=3, seed=1, max_tokens=200)
    for choice in several.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


# What a tiny model with large random weights says is noise: whatever it says must be read, and what it must say, said.
def tiny_tokenizer(marks=(), special=()):
    plain = tiny_tokenizers.byte_level().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=type(plain).from_str(plain.to_str()), eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in special]})
    tokenizer.chat_template = (
        "{{ '" + " ".join(marks).replace('"', "") + "' if false else '' }}{% for m in messages %}{{ m['role'] }}: "
        "{{ m['content'] }}{% endfor %}{{ tools | tojson if tools else '' }}answer:"
    )
    return tokenizer


@pytest.fixture(scope="module")
def tiny_server():
    """A server for each tokenizer, made when it is asked for."""
    opened = []

    def serve(tokenizer):
        model = tiny_models.make("llama", vocab_size=len(tokenizer) + 5, max_position_embeddings=2048, eos_token_id=1)
        model.generation_config.eos_token_id = 1
        batcher = ContinuousBatcher(model, tokenizer, num_blocks=400, prepack=False)
        context = served(batcher)
        opened.append((context, batcher))
        return context.__enter__()

    yield serve
    for context, batcher in opened:
        context.__exit__(None, None, None)
        batcher.close()


FORCED = {
    "hermes": (("<tool_call>",), ()),
    "hermes special": (("<tool_call>",), ("<tool_call>", "</tool_call>")),
    "qwen3_coder": (("<tool_call>", "<function="), ()),
    "llama3_json": (("<|python_tag|>",), ("<|python_tag|>",)),
    "mistral": (("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    "mistral named": (("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]", "[ARGS]")),
    "deepseek": (("<｜tool▁call▁begin｜>",), ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")),
    "deepseek fenced": (("<｜tool▁call▁begin｜>", "```json"), ()),
    "granite": (("<|tool_call|>",), ("<|tool_call|>",)),
}


@pytest.mark.parametrize("family", FORCED)
def test_required_calls_are_calls_of_the_tools_with_their_arguments(tiny_server, family):
    server = tiny_server(tiny_tokenizer(*FORCED[family]))
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in (WEATHER, NOW)}
    body = {"messages": ASKED, "tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False,
            "temperature": 1, "seed": 3, "n": 4, "max_tokens": 160}  # fmt: skip
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = [choice for choice in answer.json()["choices"] if choice["finish_reason"] != "length"]
    assert choices
    for choice in choices:
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), tools[call["function"]["name"]])


STOP = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/Stop"}},
    "required": ["days"],
    "additionalProperties": False,
}
TRIP = {"type": "object", "properties": {"stop": {"$ref": "#/$defs/Stop"}}, "required": ["stop"],
        "$defs": {"Stop": STOP}}  # fmt: skip


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "llama3_json", "mistral named", "deepseek", "granite"])
def test_schemas_of_arguments_may_refer_to_themselves(tiny_server, family):
    """As pydantic writes those of nested models."""
    server = tiny_server(tiny_tokenizer(*FORCED[family]))
    anything = {"name": "any", "parameters": {"type": "object", "properties": {"x": True}, "required": ["x"]}}
    tools = [{"type": "function", "function": {"name": "trip", "parameters": TRIP}},
             {"type": "function", "function": anything}]  # fmt: skip
    body = {"messages": ASKED, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "trip"}},
            "temperature": 1, "seed": 3, "n": 4, "max_tokens": 160}  # fmt: skip
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = [choice for choice in answer.json()["choices"] if choice["finish_reason"] == "tool_calls"]
    assert choices
    for choice in choices:
        jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), TRIP)
    asked = body | {"tool_choice": "required", "max_tokens": 3}
    assert server.client.post("/v1/chat/completions", json=asked).is_success


def test_a_family_that_cannot_be_held_to_calls_is_named(tiny_server):
    server = tiny_server(tiny_tokenizer(("<|tool_call>",)))
    body = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required"}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 422
    assert "gemma4" in answer.json()["error"]["message"]
    assert server.client.post("/v1/chat/completions", json=body | {"tool_choice": "auto", "max_tokens": 5}).is_success


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server(tiny_tokenizer(("<tool_call>",)))


def test_stream_and_whole_answer_say_the_same(server):
    body = {"messages": ASKED, "tools": [WEATHER, NOW], "seed": 11, "temperature": 1.0, "n": 2, "max_tokens": 50,
            "logprobs": True}  # fmt: skip
    for more in ({}, {"tool_choice": "required"}, {"tool_choice": "none"},
                 {"response_format": {"type": "json_object"}}):  # fmt: skip
        whole = server.client.post("/v1/chat/completions", json=body | more).json()
        client = client_of(server)
        counts, texts = {}, {}
        for chunk in client.chat.completions.create(model=whole["model"], stream=True, **(body | more)):
            for choice in chunk.choices:
                got = texts.setdefault(choice.index, ["", [], None])
                got[0] += choice.delta.content or ""
                got[1] += [call.function.arguments for call in choice.delta.tool_calls or []]
                got[2] = choice.finish_reason or got[2]
                logprobs = choice.logprobs.content if choice.logprobs else []
                counts[choice.index] = counts.get(choice.index, 0) + len(logprobs)
        for choice in whole["choices"]:
            calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
            assert texts[choice["index"]] == [choice["message"]["content"] or "", calls, choice["finish_reason"]]
            assert counts[choice["index"]] == len(choice["logprobs"]["content"])


def test_with_a_format_and_tools_the_answer_is_one_of_both(server):
    body = {"messages": ASKED, "tools": [NOW], "parallel_tool_calls": False, "max_tokens": 150, "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}  # fmt: skip
    tokenizer = server.batcher.tokenizer
    found = {}
    for text in ("7", "<"):
        bias = {str(tokenizer(text)["input_ids"][0]): 100}
        answer = server.client.post("/v1/chat/completions", json=body | {"logit_bias": bias}).json()
        found[text] = answer["choices"][0]
    assert found["7"]["message"]["content"] == "7"
    assert found["<"]["message"]["tool_calls"][0]["function"]["name"] == "now"


DEEP = json.loads('{"not":' * 600 + "{}" + "}" * 600)
BAD = [
    ({"tools": 5}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0]"),
    ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "no"}}}}}],
      "tool_choice": "required"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_mistakes_are_named(server, fields, param):
    for more in ({}, {"stream": True}):
        answer = server.client.post("/v1/chat/completions", json={"messages": ASKED, **fields, **more})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_completions_take_formats_too(server):
    body = {"prompt": "x", "max_tokens": 30, "guided_choice": ["left", "right"]}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("left", "right")


def test_thoughts_come_apart_from_content(tiny_server, monkeypatch):
    """A grammar stands for a model that thinks."""
    monkeypatch.setattr(answer_plan, "behind_thought", lambda tokenizer, grammar, *_, **__: grammar)
    server = tiny_server(tiny_tokenizer(("<think>", "</think>")))
    thought = {"guided_grammar": 'start: "<think>\\nHm, yes.\\n</think>\\n\\nHello there"'}
    body = {"messages": ASKED, "max_tokens": 200, **thought}
    whole = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert whole["message"]["content"] == "Hello there"
    assert whole["message"]["reasoning_content"] == "Hm, yes."
    client = client_of(server)
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=ASKED, max_tokens=200, extra_body=thought, stream=True
    )
    assert from_stream(stream) == ("Hello there", "Hm, yes.", [], "stop")


def test_each_family_has_a_reader_that_is_tested():
    assert {family.name for family in FAMILIES} >= {name.split()[0] for name in FORCED}
