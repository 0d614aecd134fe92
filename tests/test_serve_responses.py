"""/v1/responses, as the openai client's typed objects and its stream helper take it."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
import tiny_models
import tiny_tokenizers
from openai.types.responses import Response
from pydantic import BaseModel
from served import served
from transformers import PreTrainedTokenizerFast

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.errors import InvalidLogitsError
from hfpaged.serve import answer_plan
from hfpaged.serve.http_errors import api_error

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Of a city", "parameters": PARAMETERS,
           "strict": True}  # fmt: skip
CHOICE = {"type": "json_schema", "name": "x", "schema": {"enum": ["left", "right"]}, "strict": True}


@pytest.fixture(scope="module")
def server():
    plain = tiny_tokenizers.byte_level().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    tokenizer.chat_template = (
        "{{ '<tool_call><think></think>' if false else '' }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
        "{{ m['tool_calls'] | tojson if m['tool_calls'] else '' }};{% endfor %}{{ tools | tojson if tools else '' }}>"
    )
    model = tiny_models.make("llama", vocab_size=len(tokenizer) + 5, max_position_embeddings=2048, eos_token_id=1)
    model.generation_config.eos_token_id = 1
    with ContinuousBatcher(model, tokenizer, num_blocks=400, prepack=False) as batcher, served(batcher) as server:
        yield server
    hfpaged.unpatch(model)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def no_thoughts(monkeypatch):
    """Noise that may think goes on thinking."""
    monkeypatch.setattr(answer_plan, "behind_thought", lambda tokenizer, grammar, *_, **__: grammar)


@pytest.fixture(scope="module", autouse=True)
def name(server):
    server.service.options.__dict__["served_model_names"] = ("tiny",)


def test_a_text_cut_by_its_length(client, server):
    response = client.responses.create(
        model="tiny", input="hello", max_output_tokens=12, temperature=0, metadata={"a": "b"}, instructions="be kind"
    )
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.metadata == {"a": "b"}
    prompt = server.batcher.tokenizer("system: be kind;user: hello;>")["input_ids"]
    assert response.usage.input_tokens == len(prompt)
    assert response.usage.output_tokens == 12
    again = client.responses.create(model="tiny", input="hello", max_output_tokens=12, temperature=0,
                                    instructions="be kind")  # fmt: skip
    assert again.output_text == response.output_text
    assert again.usage.input_tokens_details.cached_tokens > 0
    (output,) = server.client.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 12, "temperature": 0}
    ).json()["choices"]
    assert response.output_text == output["text"]


def test_whole_answers_fit_the_clients_own_types(client, no_thoughts):
    response = client.responses.create(model="tiny", input="hello", text={"format": CHOICE})
    Response.model_validate(response.to_dict(), extra="forbid")  # the client itself checks nothing
    assert response.status == "completed"
    assert json.loads(response.output_text) in ("left", "right")
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")


def test_the_stream_helper_puts_the_same_response_together(client, no_thoughts):
    arguments = {"model": "tiny", "input": [{"role": "user", "content": "hello"}], "text": {"format": CHOICE}}
    whole = client.responses.create(**arguments)
    with client.responses.stream(**arguments) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_calls_are_items_and_their_outputs_go_back(client, server, no_thoughts):
    tokenizer = server.batcher.tokenizer
    spaces = {str(token): -100 for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()}
    arguments = {"model": "tiny", "input": "weather?", "tools": [WEATHER], "tool_choice": "required",
                 "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 100,
                 "extra_body": {"logit_bias": spaces}}  # fmt: skip
    response = client.responses.create(**arguments)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    with client.responses.stream(**arguments) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [(item.name, item.arguments) for item in final.output] == [(call.name, call.arguments)]
    kinds = [event.type for event in events][2:]
    assert kinds == ["response.output_item.added", "response.function_call_arguments.delta",
                     "response.function_call_arguments.done", "response.output_item.done",
                     "response.completed"]  # fmt: skip
    items = [{"role": "user", "content": "weather?"}, *response.output,
             {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]  # fmt: skip
    said = client.responses.create(model="tiny", input=items, tools=[WEATHER], max_output_tokens=5)
    assert said.usage.input_tokens > response.usage.input_tokens


def test_thoughts_are_an_item_of_their_own(client, no_thoughts):
    thought = {"guided_grammar": 'start: "<think>\\nHm.\\n</think>\\n\\nHello"'}
    with client.responses.stream(model="tiny", input="x", extra_body=thought) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text == "Hm."
    assert final.output_text == "Hello"
    assert "response.reasoning_text.delta" in {event.type for event in events}


def test_parse_gives_an_object_of_the_clients_own_class(client, no_thoughts):
    class Side(BaseModel):
        side: bool

    parsed = client.responses.parse(model="tiny", input="x", text_format=Side, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Side)


def test_no_words_are_an_empty_message(client, server):
    bias = {"1": 100}
    response = client.responses.create(model="tiny", input="x", extra_body={"logit_bias": bias})
    assert (response.status, response.output_text, len(response.output)) == ("completed", "", 1)
    with client.responses.stream(model="tiny", input="x", extra_body={"logit_bias": bias}) as stream:
        assert stream.until_done().get_final_response().output_text == ""


BAD = [
    ({"text": {"format": {"type": "text", "more": json.loads('{"not":' * 600 + "{}" + "}" * 600)}}}, "text"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": False}, "conversation"),
    ({"background": True}, "background"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"format": {**CHOICE, "schema": {"type": "objekt"}}}}, "text.format"),
    ({"text": 5}, "text"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_mistakes_are_named(server, fields, param):
    for more in ({}, {"stream": True}):
        answer = server.client.post("/v1/responses", json={"input": "x", **fields, **more})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_a_prompt_that_is_too_long_names_the_input(server):
    answer = server.client.post("/v1/responses", json={"input": "the quick brown fox " * 600})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


def test_a_request_that_fails_ends_its_stream_with_that(server, client, monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(answer_plan.Pieces, "new", fail)
        stream = client.responses.create(model="tiny", input="x", stream=True, max_output_tokens=5)
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"
    server.wait_until_idle()


def test_settings_that_leave_no_numbers_are_not_the_servers_fault():
    """A repetition penalty of 5e-324 is one."""
    assert api_error(InvalidLogitsError(1, 1)).status == 422
