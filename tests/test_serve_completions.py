"""/v1/completions, through OpenAI's own client: prompts of all kinds, echo with logprobs, streams."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import openai
import pytest
import serve_models
import tiny_models
import torch
from served import served

from hfpaged import ContinuousBatcher
from hfpaged.serve import ServeOptions
from hfpaged.serve.logprob_text import CompletionLogprobs, TokenTexts

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "tiny"
TEXTS = ["the quick brown fox", "stop, don't stop", "naïve café"]


@pytest.fixture(scope="module")
def server():
    with serve_models.batcher() as batcher, served(batcher, ServeOptions(served_model_names=(NAME,))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def plain():
    """The model without a batcher: the judge of logprobs."""
    return tiny_models.make("llama", vocab_size=len(serve_models.tokenizer()))


def ask(client, prompt=TEXTS[0], **settings):
    return client.completions.create(model=NAME, prompt=prompt, **settings)


def post(server, **body):
    return server.client.post("/v1/completions", json={"prompt": TEXTS[0], **body})


def engine_says(server, prompts, **settings):
    """The judge: the same batcher, without HTTP between."""

    async def all_of_them():
        engine = server.service.engine
        return await asyncio.gather(*(engine.generate(prompt, **settings) for prompt in prompts))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
def test_prompts_of_each_kind_go_on_as_in_process(server, client, kind):
    ids = [server.batcher.tokenizer(text)["input_ids"] for text in TEXTS]
    prompt = {"text": TEXTS[0], "texts": TEXTS, "ids": ids[0], "lists of ids": ids}[kind]
    own = engine_says(server, ids if kind in ("texts", "lists of ids") else ids[:1], max_new_tokens=16)
    answer = ask(client, prompt)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (index, output.text) for index, output in enumerate(own)
    ]
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in own)
    assert answer.usage.completion_tokens == 16 * len(own)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_counted_prompt_by_prompt(server, client, stream):
    own = engine_says(server, TEXTS, n=2, do_sample=True, temperature=1.0, top_k=0, seed=3, max_new_tokens=6)
    answer = ask(client, TEXTS, n=2, temperature=1.0, seed=3, max_tokens=6, stream=stream)
    texts = [""] * 6
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [seq.text for output in own for seq in output.sequences]


def test_a_stream_has_one_id_and_a_reason_at_its_end(server, client):
    chunks = list(ask(client, stream=True, max_tokens=20, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    *pieces, last = chunks
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        len(server.batcher.tokenizer(TEXTS[0])["input_ids"]),
        20,
    )
    assert all(chunk.choices[0].text for chunk in pieces[:-1])
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert "".join(chunk.choices[0].text for chunk in pieces) == ask(client, max_tokens=20).choices[0].text


def forward_logprobs(plain, token_ids):
    with torch.no_grad():
        logits = plain(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("max_tokens", [1, 0])
@pytest.mark.parametrize("as_ids", [True, False])
def test_echo_gives_the_logprobs_that_a_plain_forward_gives(server, client, plain, max_tokens, as_ids):
    """What lm-eval asks for to score a text."""
    ids = server.batcher.tokenizer(TEXTS[0])["input_ids"]
    answer = ask(client, ids if as_ids else TEXTS[0], max_tokens=max_tokens, echo=True, logprobs=2, temperature=0)
    (choice,) = answer.choices
    told = choice.logprobs
    scores = forward_logprobs(plain, ids)
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    expected = [scores[place, token].item() for place, token in enumerate(ids[1:])]
    assert told.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-3)
    for place, top in enumerate(told.top_logprobs[1 : len(ids)]):
        best = scores[place].max().item()
        assert max(top.values()) == pytest.approx(best, abs=1e-3)
        assert 2 <= len(top) <= 3
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(ids) + max_tokens
    assert answer.usage.completion_tokens == max_tokens
    assert choice.text.startswith(TEXTS[0])
    if max_tokens == 0:
        assert choice.text == TEXTS[0]
        assert choice.finish_reason == "length"
    assert "".join(told.tokens[: len(ids)]) == TEXTS[0]
    for token, offset in zip(told.tokens[: len(ids)], told.text_offset, strict=False):
        assert choice.text[offset : offset + len(token)] == token


def test_a_format_ends_the_answer_of_a_model_without_an_end_of_its_own(server, client):
    assert server.batcher.model.generation_config.eos_token_id is None
    for more in ({}, {"stop_token_ids": [399]}):
        (choice,) = ask(client, max_tokens=20, extra_body={"guided_choice": ["fox"], **more}).choices
        assert (choice.text, choice.finish_reason) == ("fox", "stop")


def test_offsets_are_places_in_the_text(server, client):
    """Of characters in several tokens, special tokens that the text has, and those that it does not have."""
    tokenizer = server.batcher.tokenizer
    special = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = tokenizer("🙃 naïve <|end|>猫")["input_ids"]
    settings = {"echo": True, "logprobs": 0, "max_tokens": 2, "logit_bias": {str(special): 100}}
    for prompt in (ids, tokenizer.decode(ids)):
        (choice,) = ask(client, prompt, **settings).choices
        told = choice.logprobs
        for token, start in zip(told.tokens[:-2], told.text_offset, strict=False):
            assert token in (choice.text[start : start + len(token)], "\ufffd"), (token, start)
        assert told.text_offset[-2:] == [len(choice.text)] * 2  # the answer is <|end|>, which is left out
        halves = [start for token, start in zip(told.tokens, told.text_offset, strict=True) if token == "\ufffd"]
        assert {choice.text[start] for start in halves} == {"🙃", "猫"}
    found = CompletionLogprobs(TokenTexts(tokenizer))
    begun = [tokenizer.bos_token_id, *tokenizer("the fox")["input_ids"]]
    assert found.of(begun, [None] * len(begun), prompt="the fox")["text_offset"][:2] == [0, 0]


def test_echo_in_a_stream_is_the_same_as_whole(client):
    settings = {"echo": True, "logprobs": 1, "max_tokens": 6}
    whole = ask(client, TEXTS, **settings)
    text, tokens, logprobs, offsets = ([""] * 3, [[], [], []], [[], [], []], [[], [], []])
    for chunk in ask(client, TEXTS, stream=True, **settings):
        for choice in chunk.choices:
            text[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            logprobs[choice.index] += choice.logprobs.token_logprobs
            offsets[choice.index] += choice.logprobs.text_offset
    for choice in whole.choices:
        assert text[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert logprobs[choice.index][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
        assert offsets[choice.index] == choice.logprobs.text_offset


def test_nothing_new_can_be_asked_for_in_a_stream(client):
    chunks = list(ask(client, max_tokens=0, echo=True, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXTS[0]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 0


def test_tokens_can_be_named_by_their_ids(client):
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = ask(client, max_tokens=3, logprobs=0, extra_body=more).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert [list(top) for top in choice.logprobs.top_logprobs] == [[token] for token in choice.logprobs.tokens]


def test_without_a_tokenizer_token_ids_come_and_go():
    model = tiny_models.make("llama")
    with ContinuousBatcher(model, num_blocks=64) as batcher, served(batcher) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}
        answer = server.client.post("/v1/completions", json=body).json()
        (own,) = engine_says(server, [[5, 6, 7]], max_new_tokens=4)
        assert answer["choices"][0]["token_ids"] == own.token_ids
        response = server.client.post("/v1/completions", json=body | {"stream": True})
        pieces = [chunk["choices"][0]["token_ids"] for chunk in serve_models.events(response)]
        assert list(itertools.chain(*pieces)) == own.token_ids
        refused = server.client.post("/v1/completions", json=body | {"prompt": "text"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "no_tokenizer")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 999}, "prompt"),
        ({"max_tokens": True}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2, "temperature": 1}, "best_of"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop": 5}, "stop"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": {"include_usage": 5}, "stream": True}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_field_is_named_in_one_sentence(server, body, param):
    response = server.client.post(
        "/v1/completions", content=json.dumps({"prompt": "the", **body}), headers={"Content-Type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["code"]
    assert len(error["message"]) < 250


def test_one_prompt_that_is_too_long_takes_none_of_the_others(server):
    response = post(server, prompt=[TEXTS[0], "the fox " * 400])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    server.wait_until_idle()  # the first one had been there for a moment


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"{", "application/json", "invalid_json"),
        (b"[1]", "application/json", "invalid_body"),
        (b'"a"', "application/json", "invalid_body"),
        (b"", "application/json", None),
        (b"\xff", "application/json", None),
        (b'{"prompt": "a"}', "text/plain", "invalid_body"),
        (b"{}", "application/json", "missing_field"),
    ],
)
def test_what_is_no_body_is_told(server, content, kind, code):
    response = server.client.post("/v1/completions", content=content, headers={"Content-Type": kind})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"]
    assert code in (None, error["code"])


def test_a_client_who_leaves_is_given_up(server):
    with httpx.Client(base_url=server.url) as client:
        body = {"prompt": TEXTS, "max_tokens": 200, "stream": True, "n": 4, "temperature": 1.0}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            assert server.batcher.loop.requests
    server.wait_until_idle()
