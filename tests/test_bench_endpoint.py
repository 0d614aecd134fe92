"""Whether what --against names is an OpenAI-compatible server, and in which form it takes prompts."""

from __future__ import annotations

import copy
import socket
import threading

import pytest
from bad_servers import (
    MODELS,
    answering,
    garbage,
    no_http,
    no_models,
    nothing,
    redirect,
    status,
    stream,
    tiny_with_chat,
)

from hfpaged import cli
from hfpaged.bench import against_form, endpoint
from hfpaged.bench.against_form import FORMS, form_for
from hfpaged.bench.endpoint import Endpoint, EndpointError, reach

pytestmark = pytest.mark.usefixtures("no_key")

PROMPT = list(range(5, 25))


@pytest.fixture
def no_key(monkeypatch):
    monkeypatch.delenv(endpoint.KEY_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny():
    return tiny_with_chat()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(401), "answers 401 Unauthorized; give a key that it takes, by OPENAI_API_KEY or --against-key"),
        (status(404), "answers 404 Not Found; give the URL of an OpenAI-compatible server, up to its /v1"),
        (status(503), "answers 503 Service Unavailable; its log may say why"),
        (redirect, "answers 302"),
        (garbage, "gives no list of models but '<html>"),
        (no_models, "lists no model"),
        (nothing, "cannot be asked (Remote end closed connection"),
        (no_http, "cannot be asked"),
    ],
)
def test_what_is_no_such_server_is_one_line_before_anything_is_loaded(answer, words, capsys):
    with answering(answer) as url:
        assert cli.main(["bench", "batch", "./no-such-model", "--against", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert f"{url}/v1/models" in line


def test_where_nobody_listens_and_where_nobody_answers(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(EndpointError, match="is a server running there"):
            reach(f"http://127.0.0.1:{port}")
        silent.listen()
        monkeypatch.setattr(endpoint, "PATIENCE", 0.2)
        with pytest.raises(EndpointError, match="timed out"):
            reach(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "url", ["localhost:9000", "ftp://host", "http://", "http://me:secret@host", "http://host?key=secret", ""]
)
def test_what_is_no_url_is_refused_without_telling_a_secret(url, capsys):
    assert cli.main(["bench", "generate", "--against", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "give a URL as http://localhost:9000" in line
    assert "secret" not in line


def test_a_key_may_end_with_a_line_break_and_have_none_inside(capsys):
    seen = []

    def answer(handler):
        seen.append(handler.headers["Authorization"])
        handler.say(200, MODELS)

    with answering(answer) as url:
        assert reach(url, "secret\n").key == "secret"
        assert reach(url, " ").key is None
        assert cli.main(["bench", "batch", "--against", url, "--against-key", "se\ncret"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "characters that no HTTP header can have" in line
    assert "cret" not in line
    assert seen == ["Bearer secret", None]


def test_the_first_model_is_taken_or_the_one_that_is_named():
    with answering(lambda handler: handler.say(200, MODELS)) as url:
        assert reach(url).model == "first"
        assert reach(f"{url}/v1/", model="second").model == "second"
        with pytest.raises(ValueError, match="no such model; it has first, second"):
            reach(url, model="third")
        assert reach(url).salt != reach(url).salt


@pytest.mark.parametrize(
    ("refused", "form"),
    [
        (lambda body: False, 0),
        (lambda body: isinstance(body["prompt"], list), 1),
        (lambda body: "ignore_eos" in body, 2),
        (lambda body: "ignore_eos" in body or "stream_options" in body, 3),
    ],
)
def test_a_server_is_asked_in_a_form_that_it_takes(refused, form, tiny):
    def answer(handler):
        handler.say(*((400, {"error": "unknown field"}) if refused(handler.body) else (200, stream("ab"))))

    with answering(answer) as url:
        assert form_for(Endpoint(url, "m"), tiny[1], PROMPT) is FORMS[form]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(401), "give a key that it takes"),
        (status(404), "give the URL of an OpenAI-compatible server"),
        (garbage, "gave no text"),
        (lambda handler: handler.say(200, b"data: {oops\n\n"), "streams no events of completions"),
        (lambda handler: handler.say(200, b"data: [1]\n\n"), "streams no events of completions"),
        (nothing, "the server answered ''"),
        (no_http, "the server answered 'SSH-2.0"),
    ],
)
def test_completions_that_are_none_are_an_error_with_the_servers_words(answer, words, tiny):
    with answering(answer) as url, pytest.raises(EndpointError, match=words):
        form_for(Endpoint(url, "m"), tiny[1], PROMPT)


def test_a_server_that_never_answers_is_waited_for_no_longer_than_patience(tiny, monkeypatch):
    monkeypatch.setattr(against_form, "PATIENCE", 0.5)
    monkeypatch.setattr(against_form, "FORMS", FORMS[:1])
    done = threading.Event()
    with answering(lambda handler: done.wait(20)) as url:
        with pytest.raises(EndpointError, match=r"has not answered all 1 requests in 0\.5 s"):
            form_for(Endpoint(url, "m"), tiny[1], PROMPT)
        done.set()


def test_chat_is_for_servers_that_have_nothing_else(tiny):
    def answer(handler):
        is_chat = handler.path == "/v1/chat/completions"
        handler.say(*((200, stream("ab")) if is_chat and handler.body["messages"] else (404, {})))

    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = None
    with answering(answer) as url:
        with pytest.raises(EndpointError, match=r"/v1/completions: .* 404 Not Found"):
            form_for(Endpoint(url, "m"), tokenizer, PROMPT)
        tokenizer.chat_template = "{{ messages }}"
        assert form_for(Endpoint(url, "m"), tokenizer, PROMPT).name == "chat"
