"""/v1/kv/*: numbers are those of the metrics, explanations are for their caller alone, a reset is all or nothing."""

from __future__ import annotations

import copy
import threading

import httpx
import peft
import pytest
import tiny_models
import tiny_tokenizers
from served import served, wait_until

from hfpaged import ContinuousBatcher
from hfpaged.doctor.exposition import parse
from hfpaged.serve import ServeOptions
from hfpaged.serve.callers import Caller
from hfpaged.serve.kv.block_runs import holders_of, map_record
from hfpaged.serve.kv.live import Live
from hfpaged.serve.kv.recent import Sample, quantiles
from hfpaged.telemetry import metrics_text

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}
PROMPT = list(range(3, 43))  # two full blocks of 16, and eight tokens
NEW = 12  # tokens, with which the third block is full: only full ones are kept
ENDLESS = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def batcher():
    model = tiny_models.make("llama", vocab_size=420)  # the table's models have too few tokens for a tokenizer
    with ContinuousBatcher(model, tiny_tokenizers.byte_level(), num_blocks=64, block_size=16) as batcher:
        yield batcher


@pytest.fixture
def server(batcher):
    with served(batcher) as server:
        yield server
    batcher.pool.drop_prefixes()


@pytest.fixture
def shared_server(batcher):
    """One with two API keys."""
    with served(batcher, ServeOptions(api_keys=KEYS)) as server:
        yield server
    batcher.pool.drop_prefixes()


def bearer(tenant):
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def complete(server, tenant=None, **body):
    headers = {} if tenant is None else bearer(tenant)
    answer = server.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": NEW} | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def explain(server, tenant=None, **body):
    headers = {} if tenant is None else bearer(tenant)
    answer = server.client.post("/v1/kv/explain", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Running:
    """Requests of a thread that hangs up when it is told to."""

    def __init__(self, server, tenant=None):
        self._server, self._tenant, self._ends = server, tenant, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        headers = {} if self._tenant is None else bearer(self._tenant)
        with httpx.Client(base_url=self._server.url, headers=headers, timeout=30) as client:
            while not self._ends.is_set():  # a tiny model makes its tokens in no time
                with client.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as answer:
                    for _ in answer.iter_lines():
                        if self._ends.is_set():
                            return

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ends.set()
        self._thread.join()


def stats(server, tenant=None, **query):
    headers = {} if tenant is None else bearer(tenant)
    answer = server.client.get("/v1/kv/stats", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def held(server, look):
    """`look` at a moment in which a request holds blocks: the engine stands still meanwhile."""
    with server.batcher.loop._held():
        if not server.batcher.requests_with_blocks():
            return None
        return look()


def when_running(server, look):
    found = []

    def try_it():
        seen = held(server, look)
        if seen is not None:
            found.append(seen)
        return found

    wait_until(try_it)
    return found[0]


def test_numbers_are_those_of_the_metrics(server):
    complete(server)
    complete(server, prompt=[*PROMPT, 50, 51])
    server.client.post("/v1/completions", json={"prompt": [3] * 400})  # refused
    server.wait_until_idle()
    told = stats(server)
    metrics = parse(metrics_text(server.batcher))

    def metric(name, **labels):
        found = [each.value for each in metrics.samples[name] if labels.items() <= each.labels.items()]
        assert found, name
        return sum(found)

    blocks = told["pool"]["blocks"]
    for state in ("used", "cached", "free", "reserved"):
        assert blocks[state] == metric("hfpaged_kv_blocks", state=state)
    assert blocks["total"] == 64
    for kind, size in told["pool"]["bytes"].items():
        assert size == metric("hfpaged_kv_bytes", kind=kind)
    assert told["prefixes"]["hit_tokens_total"] == metric("hfpaged_prefix_hit_tokens_total") > 0
    assert told["prefixes"]["queried_tokens_total"] == metric("hfpaged_prefix_queried_tokens_total")
    for reason, count in told["prefixes"]["lookups_total"].items():
        assert count == metric("hfpaged_prefix_lookups_total", reason=reason)
    totals = told["totals"]
    assert totals["requests_received"] == metric("hfpaged_requests_received_total")
    assert totals["requests_rejected"]["too_long"] == metric("hfpaged_requests_rejected_total", reason="too_long") > 0
    assert totals["generated_tokens"] == metric("hfpaged_generated_tokens_total")
    assert told["latency"]["time_to_first_token"]["count_total"] == metric("hfpaged_time_to_first_token_seconds_count")
    assert told["latency"]["inter_token"]["sum_total"] == metric("hfpaged_inter_token_latency_seconds_sum")
    assert told["requests"]["running"] == metric("hfpaged_requests_running") == 0


def test_what_runs_is_listed_with_its_memory(server):
    with Running(server):
        told, memory = when_running(server, lambda: (look(server, ""), server.batcher.memory_map()))
    row = told["requests"]["list"][0]
    assert row["state"] == "running"
    assert row["prompt_tokens"] == len(PROMPT)
    assert row["kv_bytes"]["own"] + row["kv_bytes"]["shared"] == memory.num_used * memory.block_bytes
    assert row["blocks"] == memory.num_used == told["pool"]["blocks"]["used"]
    states = [state for state, count in told["memory_map"]["states"] for _ in range(count)]
    assert [state > 0 for state in states] == [memory.state(block) in ("used", "shared") for block in range(64)]
    assert told["memory_map"]["names"] == [row["id"]]


def test_the_last_minutes_are_told_second_by_second(server):
    complete(server)
    told = stats(server)
    assert sum(second["decode_tokens"] for second in told["history"]) == NEW
    assert sum(second["queried_tokens"] for second in told["history"]) == len(PROMPT)
    assert told["history"][-1]["cached"] == told["pool"]["blocks"]["cached"] > 0
    assert told["prefixes"]["recent"]["queried_tokens"] == len(PROMPT)
    assert told["latency"]["time_to_first_token"]["count"] == 1
    assert told["latency"]["inter_token"]["count"] == NEW - 1
    assert len(stats(server, since=told["time"] + 1)["history"]) <= 1
    assert stats(server, since=-1 + told["history"][-1]["time"])["history"][-1]["time"] >= told["history"][-1]["time"]


def test_a_miss_says_why(server):
    complete(server)
    complete(server, prompt=PROMPT[:20] + [99] * 20)
    latest = stats(server)["prefixes"]["misses"][0]
    assert (latest["hit_tokens"], latest["queried_tokens"], latest["reason"]) == (20, 40, "differs")
    assert latest["explanation"].startswith("20 of 40 prompt tokens were known: it goes on unlike")


def test_the_doctor_is_asked_now_and_then_only(server):
    first, second = stats(server)["doctor"], stats(server)["doctor"]
    assert first["verdict"]
    assert second["age_seconds"] > first["age_seconds"]


def test_stats_have_the_shape_that_is_declared(server):
    from hfpaged.serve.schemas.kv import Stats

    complete(server)
    told = stats(server)
    assert Stats.model_validate(told, strict=True).model_dump() == told
    document = server.client.get("/openapi.json").json()
    reference = document["paths"]["/v1/kv/stats"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert reference == {"$ref": "#/components/schemas/Stats"}


def test_explain_says_how_much_is_known_and_where_a_prompt_differs(server):
    prompt = [300, *PROMPT]  # nothing like it was ever dropped, which would be told
    assert explain(server, prompt=prompt)["reason"] == "never seen"
    complete(server, prompt=prompt)
    known = explain(server, prompt=prompt)
    assert known["known_tokens"] == len(prompt) - 1
    assert known["reason"] == "complete"
    unlike = explain(server, prompt=prompt[:20] + [99] * 20)
    assert unlike["difference"]["position"] == 20
    assert unlike["difference"]["known_token"] == prompt[20]
    assert "first differs at token 20" in unlike["explanation"]


def test_explain_reads_text_as_completions_do(server):
    text = "the quick brown fox jumps over the lazy dog, " * 3
    complete(server, prompt=text)
    told = explain(server, prompt=text)
    assert told["known_tokens"] == told["prompt_tokens"] - 1 > 0


def test_explain_reads_a_conversation_as_chat_does():
    tokenizer = copy.deepcopy(tiny_tokenizers.byte_level())
    tokenizer.chat_template = "{% for m in messages %}<|name|>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
    model = tiny_models.make("llama", vocab_size=420)
    with ContinuousBatcher(model, tokenizer, num_blocks=32, block_size=4) as batcher, served(batcher) as server:
        usage = server.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8}).json()["usage"]
        told = explain(server, messages=messages)
        assert told["known_tokens"] == usage["prompt_tokens"] - 1 == told["prompt_tokens"] - 1


def test_explain_knows_the_prefixes_of_an_adapter():
    model = tiny_models.make("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="poet").eval()
    adapted.base_model.disable_adapter_layers()
    options = ServeOptions(adapters={"poet": "where it came from"})
    with ContinuousBatcher(adapted, num_blocks=32, block_size=4) as batcher, served(batcher, options) as server:
        complete(server, model="poet")
        assert explain(server, prompt=PROMPT, model="poet")["reason"] == "complete"
        base = explain(server, prompt=PROMPT)
        assert (base["known_tokens"], base["reason"]) == (0, "other key")
        assert "another adapter" in base["explanation"]


def test_explain_refuses_what_is_no_prompt(server):
    for body in ({}, {"prompt": PROMPT, "messages": []}, {"prompt": []}, {"prompt": [10**30]}, {"prompt": [-1]},
                 {"prompt": [420]}, {"prompt": {"a": 1}}):  # fmt: skip
        answer = server.client.post("/v1/kv/explain", json=body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["message"]
    assert (
        server.client.post("/v1/kv/explain", json={"messages": [{"role": "user", "content": "x"}]}).status_code == 422
    )
    assert server.client.post("/v1/kv/explain", json={"prompt": PROMPT, "model": "nobody"}).status_code == 404


def test_explain_tells_nothing_of_another_tenant(shared_server):
    complete(shared_server, "ann")
    assert explain(shared_server, "ann", prompt=PROMPT)["reason"] == "complete"
    of_known, of_unknown = (explain(shared_server, "bob", prompt=ids) for ids in (PROMPT, PROMPT[::-1]))
    assert of_known == of_unknown  # that somebody has it is not told either
    assert of_known["reason"] == "never seen"
    assert explain(shared_server, "ann", prompt=PROMPT, cache_salt="mine")["reason"] == "never seen"


def test_misses_tell_nothing_of_another_tenant(shared_server):
    complete(shared_server, "ann")
    complete(shared_server, "bob")
    mine = stats(shared_server, "bob")["prefixes"]["misses"]
    assert [(miss["tenant"], miss["reason"]) for miss in mine] == [("bob", "never seen")]


def test_of_others_requests_only_state_and_memory_are_told(shared_server):
    with Running(shared_server, "ann"):
        mine, others = when_running(shared_server, lambda: [look(shared_server, name) for name in ("ann", "bob")])
    assert mine["requests"]["list"][0]["tenant"] == "ann"
    hidden = others["requests"]["list"][0]
    assert hidden["is_hidden"]
    assert hidden["kv_bytes"] == mine["requests"]["list"][0]["kv_bytes"]
    assert [hidden[name] for name in ("id", "tenant", "prompt_tokens", "generated_tokens", "age_seconds")] == [None] * 5
    assert others["memory_map"]["names"] == [None]
    assert others["memory_map"]["holders"] == mine["memory_map"]["holders"]
    assert "request-" not in str(others)


def look(server, tenant):
    """What stats would say, of a moment in which the engine stands still."""
    return Live(server.service).look(Caller(tenant))


@pytest.mark.parametrize("path", ["stats", "explain", "reset"])
def test_all_of_them_want_a_key(shared_server, path):
    method = "GET" if path == "stats" else "POST"
    assert shared_server.client.request(method, f"/v1/kv/{path}", json={"prompt": PROMPT}).status_code == 401


def test_a_reset_forgets_all_prefixes(server):
    complete(server)
    kept = server.batcher.pool.stats().blocks_cached
    assert kept > 0
    assert server.client.post("/v1/kv/reset").json() == {"object": "kv.reset", "dropped_blocks": kept}
    assert explain(server, prompt=PROMPT)["known_tokens"] == 0


def test_a_reset_is_refused_while_blocks_are_in_use(server):
    complete(server)
    assert server.batcher.pool.pin_prefix(PROMPT) > 0
    answer = server.client.post("/v1/kv/reset")
    used = server.batcher.pool.stats().blocks_used
    assert answer.status_code == 409
    assert answer.json()["error"]["message"].startswith(f"{used} blocks of the pool are in use")
    assert answer.headers["Retry-After"]
    assert explain(server, prompt=PROMPT)["reason"] == "complete"
    server.batcher.pool.unpin_prefix(PROMPT)
    assert server.client.post("/v1/kv/reset").status_code == 200


def test_samples_of_one_request_count_as_one_holder(batcher):
    batcher.add_request(PROMPT, max_new_tokens=30, n=2, do_sample=True, seed=1, request_id="two of me")
    for _ in range(20):
        batcher.step()
    memory = batcher.memory_map()
    (holder,) = holders_of(memory, ["two of me"])
    assert (holder.name, holder.kind, holder.shared) == ("two of me", "request", 0)
    assert len(holder.blocks) == memory.num_used
    record = map_record(memory, [holder])
    assert sum(count for _, count in record["states"]) == memory.num_blocks
    assert sorted(b for first, count in record["holders"][0] for b in range(first, first + count)) == holder.blocks
    batcher.abort("two of me")
    batcher.step()


def test_quantiles_count_each_latency_as_often_as_it_was():
    samples = [Sample(0.0, 3.0, 1), Sample(0.0, 1.0, 98), Sample(0.0, 2.0, 1)]
    assert quantiles(samples, (0.5, 0.99, 1.0)) == [1.0, 2.0, 3.0]
    assert quantiles([], (0.5, 0.9)) == [None, None]
