"""Halves of characters, which JSON can write and nothing else can hold, are refused wherever they stand."""

from __future__ import annotations

import json

import pytest
import tiny_models
import tiny_tokenizers
from served import served

from hfpaged import ContinuousBatcher

pytestmark = pytest.mark.usefixtures("one_thread")
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    tokenizer = tiny_tokenizers.byte_level()
    model = tiny_models.make("llama", vocab_size=len(tokenizer))
    with ContinuousBatcher(model, tokenizer, num_blocks=64) as batcher, served(batcher) as found:
        yield found


@pytest.mark.parametrize("half", [r"\ud800", r"\uDFFF", r"\udc00\ud800", r"\ud83d\ud83d\ude42", r"\ud83dx\ude42",
                                  r"\\ud83d\ude42"])  # fmt: skip
@pytest.mark.parametrize("body", ['{"prompt": "a %s"}', '{"model": "%s"}', '{"%s": 1}', '{"prompt": ["a", "%s"]}'])
def test_half_a_character_is_refused_and_named(server, body, half):
    answer = server.client.post("/v1/completions", content=body % half, headers=HEADERS)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert r"\u" in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["🙂 and 👨‍👩‍👧", r"C:\ud800", r"\\udc00 \ud83d", "\\" * 7 + "ud83d"])
def test_whole_characters_and_what_only_looks_like_half_of_one_are_taken(server, text):
    whole = json.dumps({"prompt": text, "max_tokens": 0, "echo": True})
    answer = server.client.post("/v1/completions", content=whole, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    assert "\\ud83d\\ude42" in json.dumps("🙂")


@pytest.mark.parametrize("body", [r'{"prompt": "\ud800', r"\ud800", "[" * 5000 + r'"\ud800"'])
def test_what_is_no_json_besides_is_told_as_that(server, body):
    answer = server.client.post("/v1/completions", content=body, headers=HEADERS)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_body", "invalid_request")


@pytest.mark.parametrize("text", ["\ud800", "plain"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32-be"])
def test_only_whole_utf_8_is_read(server, text, encoding):
    """Python's reader of JSON guesses at encodings, and lets halves of characters pass in each."""
    whole = json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode(encoding, "surrogatepass")
    answer = server.client.post("/v1/completions", content=whole, headers=HEADERS)
    if (text, encoding) == ("plain", "utf-8"):
        assert answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
