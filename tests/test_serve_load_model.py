"""What `transformers chat` says besides OpenAI's API: /load_model, and generation_config in a chat."""

from __future__ import annotations

import json

import pytest
import serve_models
from served import served

from hfpaged.serve import ServeOptions

pytestmark = pytest.mark.usefixtures("one_thread")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    options = ServeOptions(api_keys={"ann": "key-of-ann"}, served_model_names=("tiny", "small"))
    headers = {"Authorization": "Bearer key-of-ann"}
    with serve_models.batcher() as batcher, served(batcher, options, headers=headers) as found:
        yield found


@pytest.fixture
def ask(server):
    def asked(config, **more):
        body = {"messages": [{"role": "user", "content": "hello"}], "generation_config": config, **more}
        return server.client.post(CHAT, json=body)

    return asked


def loaded(server, model):
    answer = server.client.post("/load_model", json={"model": model}, headers={"Authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return json.loads(answer.text.removeprefix("data: "))


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_model_that_is_here_is_ready(server, name):
    assert loaded(server, name) == {"status": "ready", "model": name, "cached": True}


def test_another_one_is_told_without_the_names_that_there_are(server):
    told = loaded(server, "large")
    assert (told["status"], "'large'" in told["message"]) == ("error", True)
    assert "tiny" not in told["message"]


def test_no_name_at_all_is_refused(server):
    assert server.client.post("/load_model", json={}).json()["error"]["param"] == "model"


@pytest.mark.parametrize("form", [json.dumps, dict])
def test_generation_config_says_how_tokens_are_chosen(ask, form):
    config = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7, "transformers_version": "5.24.0"}
    answer = ask(form(config)).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"] == ask(None, temperature=0, max_tokens=7, min_tokens=7).json()["choices"]


def test_fields_beside_it_go_first(ask):
    config = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 4}
    for length in ("max_tokens", "max_completion_tokens"):
        assert ask(config, **{length: 4, "seed": None}).json()["usage"]["completion_tokens"] == 4


def test_sampling_is_sampling(ask):
    config = {"do_sample": True, "max_new_tokens": 16, "min_new_tokens": 16}
    first, again, other = (ask(config, seed=seed).json()["choices"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("config", "param"), [("no json", "generation_config"), ([1], "generation_config"), ("3", "generation_config"),
                          ({"top_p": 7}, "top_p"), ({"max_new_tokens": "many"}, "max_tokens")],
)  # fmt: skip
def test_what_is_wrong_with_it_is_told(ask, config, param):
    refused = ask(config)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
