"""/v1/chat/completions, through OpenAI's own client: what the engine gives in process is what clients get."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest
import serve_models
from served import served

from hfpaged import ContinuousBatcher, unpatch
from hfpaged.serve import ServeOptions
from hfpaged.serve.chat_answer import ChatAnswer
from hfpaged.serve.chat_prompt import chat_prompt

pytestmark = pytest.mark.usefixtures("one_thread")
MESSAGES = [{"role": "user", "content": "the quick fox"}]
NAME = "tiny"


@pytest.fixture(scope="module")
def batcher():
    with serve_models.batcher() as found:
        yield found


@pytest.fixture(scope="module")
def server(batcher):
    with served(batcher, ServeOptions(served_model_names=(NAME,))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as found:
        yield found


def ask(client, messages=MESSAGES, **settings):
    return client.chat.completions.create(model=NAME, messages=messages, **settings)


def post(server, **body):
    return server.client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})


async def in_process(server, messages=MESSAGES, **settings):
    prompt = chat_prompt(server.batcher.tokenizer, messages)
    return await server.service.engine.generate(prompt.token_ids, **settings)


def engine_says(server, messages=MESSAGES, **settings):
    """The judge: the same batcher, without HTTP between."""
    return asyncio.run(in_process(server, messages, **settings))


def test_an_answer_is_what_the_engine_makes_of_the_template(server, client):
    answer = ask(client, max_tokens=12)
    own = engine_says(server, max_new_tokens=12)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", own.text)
    assert (choice.finish_reason, answer.object, answer.model) == ("length", "chat.completion", NAME)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(own.prompt_token_ids), 12)
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_a_stream_gives_the_same_text_in_pieces(server, client):
    whole = ask(client, max_tokens=24)
    chunks = list(ask(client, max_tokens=24, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert all(delta.content for delta in deltas[1:-1])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_in_a_last_chunk_without_choices(server):
    body = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    *others, last = serve_models.events(post(server, **body))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in others)
    body["stream_options"]["continuous_usage_stats"] = True
    counts = [chunk["usage"]["completion_tokens"] for chunk in serve_models.events(post(server, **body))]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert counts[0] >= 1


def test_a_known_prompt_is_told_as_cached(client):
    messages = [{"role": "user", "content": "naïve café, " * 8}]
    ask(client, messages, max_tokens=1)
    details = ask(client, messages, max_tokens=1).usage.prompt_tokens_details
    assert details.cached_tokens > 0


def test_several_samples_have_each_their_own_index(server, client):
    settings = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 10}
    own = engine_says(server, n=3, do_sample=True, temperature=1.0, top_k=0, seed=7, max_new_tokens=10)
    answer = ask(client, **settings)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (index, seq.text) for index, seq in enumerate(own.sequences)
    ]
    assert answer.usage.completion_tokens == 30
    texts, roles = ["", "", ""], [0, 0, 0]
    for chunk in ask(client, **settings, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [seq.text for seq in own.sequences]
    assert roles == [1, 1, 1]


def test_the_best_of_several_comes_alone_and_all_are_counted(server, client):
    own = engine_says(server, best_of=4, do_sample=True, temperature=1.0, top_k=0, seed=3, max_new_tokens=6)
    answer = ask(client, temperature=1.0, seed=3, max_tokens=6, extra_body={"best_of": 4})
    assert [choice.message.content for choice in answer.choices] == [own.text]
    assert answer.usage.completion_tokens == 24
    assert post(server, best_of=4, temperature=1.0, stream=True).json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_engines(server, client, stream):
    own = engine_says(server, max_new_tokens=12, logprobs=3)
    answer = ask(client, max_tokens=12, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        parts = [chunk.choices[0].logprobs for chunk in answer]
        told = [entry for part in parts if part is not None for entry in part.content]
    else:
        told = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in told] == pytest.approx([at.logprob for at in own.logprobs], abs=1e-4)
    for entry, at in zip(told, own.logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([top.logprob for top in at.top], abs=1e-4)
    raw = b"".join(bytes(entry.bytes) for entry in told)
    assert raw.decode(errors="replace") == own.text
    assert all(entry.token == bytes(entry.bytes).decode(errors="replace") for entry in told)


def test_a_stop_text_ends_the_answer_and_is_told(server, client):
    text = ask(client, max_tokens=24).choices[0].message.content
    stop = text[5:7]
    choice = ask(client, max_tokens=24, stop=["never", stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]
    assert choice.stop_reason == stop
    kept = ask(client, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(stop)] + stop
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, max_tokens=24, stop=stop, stream=True)]
    assert "".join(pieces) == choice.message.content


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(server, client):
    own = engine_says(server, max_new_tokens=12)
    token = own.token_ids[3]
    assert token not in own.token_ids[:3]
    answer = ask(client, max_tokens=12, extra_body={"stop_token_ids": [token], "return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.stop_reason, choice.token_ids) == ("stop", token, own.token_ids[:4])
    assert own.text.startswith(choice.message.content)
    assert choice.message.content != own.text
    later = ask(client, max_tokens=12, extra_body={"stop_token_ids": [token], "min_tokens": 8})
    assert later.usage.completion_tokens >= 8


def test_bias_and_penalties_reach_the_engine(server, client):
    own = engine_says(server, max_new_tokens=8, frequency_penalty=1.5, presence_penalty=1.0, repetition_penalty=1.3)
    settings = {"frequency_penalty": 1.5, "presence_penalty": 1.0, "extra_body": {"repetition_penalty": 1.3}}
    assert ask(client, max_tokens=8, **settings).choices[0].message.content == own.text
    forced = ask(client, max_tokens=4, logit_bias={"70": 100}, extra_body={"return_token_ids": True})
    assert forced.choices[0].token_ids == [70] * 4


def test_numbers_at_the_edge_of_what_can_be_are_answered(server, client):
    likeliest = ask(client, max_tokens=4, temperature=0).choices[0].message.content
    for least in (1e-40, 5e-324, 1e-6):
        assert ask(client, max_tokens=4, temperature=least).choices[0].message.content == likeliest
    banned = {str(token): -1e308 for token in range(server.batcher.model.config.vocab_size)}
    for temperature in (0, 1e-5, 1):
        assert ask(client, max_tokens=2, temperature=temperature, logit_bias=banned).usage.completion_tokens == 2


def test_without_a_temperature_the_model_decides_and_top_k_is_nobodys_default(server, client):
    greedy = ask(client, max_tokens=8).choices[0].message.content
    assert ask(client, max_tokens=8, temperature=0, top_p=0.5).choices[0].message.content == greedy
    own = engine_says(server, max_new_tokens=8, do_sample=True, temperature=3.0, top_k=0, seed=5)
    answer = ask(client, max_tokens=8, temperature=3.0, seed=5)
    assert answer.choices[0].message.content == own.text
    limited = engine_says(server, max_new_tokens=8, do_sample=True, temperature=3.0, top_k=2, seed=5)
    answer = ask(client, max_tokens=8, temperature=3.0, seed=5, extra_body={"top_k": 2})
    assert answer.choices[0].message.content == limited.text != own.text


def test_the_models_own_generation_config_speaks_where_the_request_is_silent(server, client):
    config = server.batcher.model.generation_config
    config.do_sample, config.temperature, config.top_k = True, 2.0, 3
    try:
        own = engine_says(server, max_new_tokens=8, seed=5, do_sample=True, temperature=2.0, top_k=3)
        assert ask(client, max_tokens=8, seed=5).choices[0].message.content == own.text
    finally:
        config.do_sample = config.temperature = config.top_k = None


def test_the_answer_takes_what_is_left_of_the_context(server, client):
    answer = ask(client)
    assert answer.usage.total_tokens == server.batcher.limits["max_model_len"]
    assert ask(client, max_completion_tokens=5).usage.completion_tokens == 5


def test_the_answer_takes_what_the_pool_holds_where_that_is_less():
    with serve_models.batcher(num_blocks=4) as batcher, served(batcher) as server:
        usage = post(server).json()["usage"]
        assert usage["total_tokens"] == 4 * batcher.pool.block_size < batcher.limits["max_model_len"]
        error = post(server, messages=[{"role": "user", "content": "fox " * 80}]).json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_special_tokens_can_be_left_in_the_text(server, client):
    special = server.batcher.tokenizer.convert_tokens_to_ids("<|name|>")
    settings = {"max_tokens": 2, "logit_bias": {str(special): 100}}
    assert ask(client, **settings).choices[0].message.content == ""
    shown = ask(client, **settings, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == "<|name|>" * 2


def test_the_last_message_goes_on(server, client):
    messages = [*MESSAGES, {"role": "assistant", "content": "jumps"}]
    prompt = chat_prompt(
        server.batcher.tokenizer, messages, add_generation_prompt=False, continue_final_message=True
    ).token_ids
    more = {"continue_final_message": True, "return_token_ids": True}
    answer = ask(client, messages, max_tokens=4, extra_body=more)
    assert answer.prompt_token_ids == prompt
    hint = ask(client, max_tokens=4, extra_body={"chat_template_kwargs": {"hint": "stop"}, "return_token_ids": True})
    assert server.batcher.tokenizer.decode(hint.prompt_token_ids).endswith("[assistant]stop")


def test_fields_that_mean_nothing_here_are_let_in(client):
    settings = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low"}
    more = {"cache_salt": "mine", "priority": 3, "nobody_knows": [1]}
    assert ask(client, max_tokens=2, parallel_tool_calls=True, extra_body=more, **settings).choices


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_tokens": 999}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 65, "temperature": 1.0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e38}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"stop": [str(number) for number in range(65)]}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ],
)
def test_a_wrong_field_is_named_as_its_client_knows_it(client, settings, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **({"messages": MESSAGES} | settings))
    assert caught.value.param == param
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(client):
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 256 tokens.*max_completion_tokens"):
        ask(client, max_completion_tokens=999)


def test_other_errors_are_the_clients_own_classes(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert client.models.retrieve(NAME).id == NAME
    assert [model.id for model in client.models.list()] == [NAME]


def test_many_streams_at_once_get_each_its_own_tokens(server):
    contents = [f"the fox {number} jumps" for number in range(32)]

    def seed_of(content):
        return int(content.split()[2])

    async def stream(client, content):
        found = ""
        messages = [{"role": "user", "content": content}]
        settings = {"max_tokens": 16, "temperature": 1.0, "seed": seed_of(content)}
        async for chunk in await client.chat.completions.create(model=NAME, messages=messages, stream=True, **settings):
            found += chunk.choices[0].delta.content or ""
        return found

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any") as client:
            return await asyncio.gather(*(stream(client, content) for content in contents))

    async def judged():
        own = (
            in_process(
                server, [{"role": "user", "content": content}], max_new_tokens=16, do_sample=True, temperature=1.0,
                top_k=0, seed=seed_of(content),
            ) for content in contents
        )  # fmt: skip
        return [output.text for output in await asyncio.gather(*own)]

    assert asyncio.run(all_of_them()) == asyncio.run(judged())


def test_keys_and_a_full_queue_are_the_clients_own_errors():
    goes_on = threading.Event()

    def waits(token_ids, scores):
        assert goes_on.wait(30)
        return scores

    options = ServeOptions(api_keys={"me": "secret"}, served_model_names=(NAME,))
    with (
        serve_models.batcher(max_num_seqs=1, max_num_queued_requests=0, num_blocks=64) as batcher,
        served(batcher, options) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            ask(client.with_options(api_key="wrong"))
        batcher.add_request([5, 6], max_new_tokens=1, logits_processor=[waits])
        try:
            with pytest.raises(openai.RateLimitError) as caught:
                ask(client)
            assert caught.value.response.headers["Retry-After"]
        finally:
            goes_on.set()


def test_a_model_without_a_template_says_so(server, client):
    tokenizer = server.batcher.tokenizer
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(openai.UnprocessableEntityError, match="chat template"):
            ask(client)
    finally:
        tokenizer.chat_template = template


def test_a_stream_that_fails_ends_with_an_error_and_nothing_like_success(server, client):
    def fails(token_ids, scores):
        raise RuntimeError("out of luck")

    submit = ChatAnswer.submissions

    def failing(self):
        for prompt, settings in submit(self):
            yield prompt, {**settings, "logits_processor": [fails]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatAnswer, "submissions", failing)
        response = post(server, stream=True, max_tokens=4)
        assert post(server, max_tokens=4).status_code == 500
    assert response.status_code == 200
    assert '"error":' in response.text
    assert "finish_reason" not in response.text
    assert "[DONE]" not in response.text


@pytest.mark.demo_model
def test_the_demo_model_answers(demo):
    model, tokenizer = demo
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    try:
        with (
            ContinuousBatcher(model, tokenizer, num_blocks=64, prepack=False) as batcher,
            served(batcher, ServeOptions(served_model_names=(NAME,))) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
        ):
            answer = ask(client, messages, max_tokens=16, temperature=0)
        assert "Paris" in answer.choices[0].message.content
    finally:
        unpatch(model)
