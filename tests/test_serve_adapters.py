"""Adapters of a server: loaded from folders, chosen by the model's name in a request."""

from __future__ import annotations

import asyncio
import copy

import adapted
import openai
import pytest
import serve_models
import tiny_models
import torch
from adapted import BASE, LORA, Judge
from peft import PromptTuningConfig, TaskType, get_peft_model
from served import served

from hfpaged import ContinuousBatcher, InvalidConfigError
from hfpaged.errors import AdapterLostError
from hfpaged.serve import ServeOptions
from hfpaged.serve.adapters import load_adapters
from hfpaged.serve.http_errors import api_error

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"max_new_tokens": 8, "do_sample": False}
NAMES = ("first", "second")
PROMPT = list(range(5, 40))


def base_model():
    return tiny_models.make("llama", vocab_size=len(serve_models.tokenizer()))


@pytest.fixture(scope="module")
def trained():
    """A model with adapters as their makers have them."""
    configs = {name: LORA[name] for name in NAMES}
    return adapted.make(configs, vocab_size=len(serve_models.tokenizer()))


@pytest.fixture(scope="module")
def folders(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    trained.save_pretrained(folder)
    return {name: str(folder / name) for name in NAMES}


@pytest.fixture(scope="module")
def judge(trained):
    return Judge(copy.deepcopy(trained))


@pytest.fixture(scope="module")
def server(folders):
    model = load_adapters(base_model(), folders)
    with ContinuousBatcher(model, serve_models.tokenizer(), num_blocks=512) as batcher:
        options = ServeOptions(served_model_names=("tiny", "tiny-2"), adapters=folders)
        with served(batcher, options) as found:
            yield found


def expected(judge, prompt, name):
    adapter = name if name in NAMES else BASE
    (tokens,) = judge.tokens(prompt, adapter, **GREEDY)
    return serve_models.tokenizer().decode(tokens, skip_special_tokens=True)


SETTINGS = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_clients_choose_adapters_by_name_and_get_the_tokens_of_each(server, judge):
    prompts = [PROMPT[start:] for start in range(6)]
    asked = [(prompt, name) for prompt in prompts for name in ("first", "tiny", "second", "tiny-2")]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(
                client.completions.create(model=name, prompt=prompt, **SETTINGS) for prompt, name in asked
            ))  # fmt: skip

    answers = asyncio.run(ask_all())
    assert [answer.choices[0].text for answer in answers] == [expected(judge, *pair) for pair in asked]
    assert [answer.model for answer in answers] == [name for _, name in asked]
    assert len({expected(judge, PROMPT, name) for name in ("first", "second", "tiny")}) == 3


def test_chats_and_streams_choose_too(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        texts = {}
        for name in ("first", "second", "tiny"):
            messages = [{"role": "user", "content": "hello there"}]
            whole = client.chat.completions.create(model=name, messages=messages, **SETTINGS)
            stream = client.chat.completions.create(model=name, messages=messages, stream=True, **SETTINGS)
            texts[name] = whole.choices[0].message.content
            assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == texts[name]
        assert len(set(texts.values())) == 3


def test_adapters_are_listed_under_their_model_and_unknown_ones_are_404(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        assert {model.id: model.parent for model in client.models.list()} == {
            "tiny": None, "tiny-2": None, "first": "tiny", "second": "tiny",
        }  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="tiny, tiny-2, first, second"):
            client.completions.create(model="third", prompt="x")


def test_prefixes_of_an_adapter_are_its_own(server):
    prompt = [99, *PROMPT[1:32], 98]

    def cached(name):
        body = {"model": name, "prompt": prompt, "max_tokens": 2}
        usage = server.client.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(name) for name in ("first", "second", "tiny")] == [0, 0, 0]
    assert [cached(name) for name in ("first", "second", "tiny")] == [32, 32, 32]
    explain = server.client.post("/v1/kv/explain", json={"model": "first", "prompt": prompt}).json()
    assert explain["known_tokens"] == 32


# Loading


def test_without_adapters_the_model_stays_what_it_is():
    model = base_model()
    assert load_adapters(model, {}) is model


def test_a_model_that_its_owner_has_wrapped_takes_more(trained, folders, judge):
    model = copy.deepcopy(trained)
    assert load_adapters(model, {"again": folders["second"]}) is model
    with ContinuousBatcher(model, num_blocks=100) as batcher:
        (output,) = batcher.generate([PROMPT], adapter="again", **GREEDY)
    assert [output.token_ids] == judge.tokens(PROMPT, "second", **GREEDY)


def test_a_pickle_is_never_read(trained, tmp_path, monkeypatch):
    trained.save_pretrained(tmp_path)
    folder = tmp_path / "first"
    torch.save({}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    monkeypatch.setattr("torch.load", None)
    with pytest.raises(InvalidConfigError, match=r"a \.bin is a pickle.* save_pretrained"):
        load_adapters(base_model(), {"first": str(folder)})


def test_what_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"--adapter mine=.* no adapter_config\.json"):
        load_adapters(base_model(), {"mine": str(tmp_path)})
    with pytest.raises(InvalidConfigError, match="there is no such folder, and no hub gives it"):
        load_adapters(base_model(), {"mine": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("name", ["v1.5", BASE, "keys"])
def test_names_that_cannot_be_are_refused(name, folders):
    with pytest.raises(InvalidConfigError, match="another"):
        load_adapters(base_model(), {name: folders["first"]})


@pytest.mark.parametrize("changes", [{"hidden_size": 96}, {"num_hidden_layers": 3}])
def test_the_adapter_of_another_model_is_refused(changes, folders):
    other = tiny_models.make("llama", **changes)
    with pytest.raises(InvalidConfigError, match=r"PEFT cannot put it on LlamaForCausalLM .* made for this model"):
        load_adapters(other, {"first": folders["first"]})
    with pytest.raises(InvalidConfigError, match=r"--adapter second=.*PEFT cannot put it"):
        load_adapters(adapted.make({"own": LORA["first"]}, **changes), {"second": folders["second"]})


def test_an_adapter_that_no_request_can_choose_is_refused_at_the_start(tmp_path):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    get_peft_model(base_model(), config).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match="PROMPT_TUNING puts tokens of its own"):
        load_adapters(base_model(), {"prompted": str(tmp_path)})


def test_a_lost_adapter_is_no_fault_of_the_server():
    assert api_error(AdapterLostError({"first"}, "the model has no adapter 'first' any more")).status == 503
