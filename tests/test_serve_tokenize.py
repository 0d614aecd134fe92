"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest
import serve_models
from served import served

from hfpaged.serve.chat_prompt import chat_prompt

pytestmark = pytest.mark.usefixtures("one_thread")
MESSAGES = [{"role": "user", "content": "the quick fox"}]
TEXT = "naïve café</s>"


@pytest.fixture(scope="module")
def server():
    with serve_models.batcher(num_blocks=64) as batcher, served(batcher) as found:
        yield found


def post(server, path, **body):
    response = server.client.post(path, json=body)
    return response.status_code, response.json()


def test_a_text_has_the_tokens_of_the_tokenizer(server):
    tokens = server.batcher.tokenizer(TEXT)["input_ids"]
    status, answer = post(server, "/tokenize", prompt=TEXT)
    assert (status, answer["tokens"], answer["count"]) == (200, tokens, len(tokens))
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] is None


def test_token_strings_put_together_are_the_text(server):
    _, answer = post(server, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"]
    assert "".join(answer["token_strs"]) == TEXT


def test_messages_have_the_tokens_of_their_prompt(server):
    tokenizer = server.batcher.tokenizer
    assert post(server, "/tokenize", messages=MESSAGES)[1]["tokens"] == chat_prompt(tokenizer, MESSAGES).token_ids
    without = chat_prompt(tokenizer, MESSAGES, add_generation_prompt=False).token_ids
    assert post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False)[1]["tokens"] == without
    hint = chat_prompt(tokenizer, MESSAGES, template_kwargs={"hint": "x"}).token_ids
    assert post(server, "/tokenize", messages=MESSAGES, chat_template_kwargs={"hint": "x"})[1]["tokens"] == hint


def test_special_tokens_are_added_where_they_are_asked_for(server):
    tokenizer = server.batcher.tokenizer
    for adds in (True, False):
        expected = tokenizer(TEXT, add_special_tokens=adds)["input_ids"]
        assert post(server, "/tokenize", prompt=TEXT, add_special_tokens=adds)[1]["tokens"] == expected


def test_tokens_become_the_text_again(server):
    tokens = server.batcher.tokenizer(TEXT)["input_ids"]
    assert post(server, "/detokenize", tokens=tokens) == (200, {"prompt": TEXT})
    assert post(server, "/detokenize", tokens=[]) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "tools": {}}, 400, "tools"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
def test_what_cannot_be_is_told(server, path, body, status, param):
    found, answer = post(server, path, **body)
    assert (found, answer["error"]["param"]) == (status, param)
