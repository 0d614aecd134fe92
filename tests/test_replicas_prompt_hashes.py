"""What an ingress makes of a body is what the replica that answers it publishes."""

from __future__ import annotations

import json

import adapted
import pytest
import serve_models
import tiny_models
from adapted import LORA
from served import served
from test_floors import ROOT, floor_of, imports_of

from hfpaged import ContinuousBatcher
from hfpaged.replicas.prompt_hashes import PromptHashes
from hfpaged.replicas.published import PublishedPrefixes
from hfpaged.replicas.reporting import Reporter
from hfpaged.replicas.routing_hash import as_numbers
from hfpaged.serve import ServeOptions
from hfpaged.serve.adapters import load_adapters

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, SECRET = 4, b"of the cluster"
KEYS = {"red": "key of red", "blue": "key of blue"}
TEXT = "Whoever reads this text finds words that no tokenizer of six lines has seen before."
SAYS = [{"role": "system", "content": TEXT}, {"role": "user", "content": "don't you see?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}

BODIES = [
    ("/v1/completions", {"prompt": list(range(3, 40)), "max_tokens": 2}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [TEXT, "another one"], "max_tokens": 2, "add_special_tokens": False}),
    ("/v1/chat/completions", {"messages": SAYS, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": SAYS, "max_tokens": 2, "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": SAYS, "max_tokens": 2, "tools": [TOOL], "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": SAYS, "max_tokens": 2, "chat_template_kwargs": {"hint": "Well, I think,"}}),
    ("/v1/chat/completions", {
        "messages": [*SAYS, {"role": "assistant", "content": "I"}], "max_tokens": 2, "continue_final_message": True,
        "add_generation_prompt": False,
    }),
    ("/v1/responses", {"input": TEXT, "instructions": "stop", "max_output_tokens": 2}),
    ("/v1/responses", {"input": SAYS, "tools": [FLAT], "max_output_tokens": 2}),
]  # fmt: skip


class Replica:
    def __init__(self, server, reporter, hashes):
        self.server, self.reporter, self.hashes = server, reporter, hashes

    def ask(self, path, body, key=None):
        """Send it on an empty pool; (the hashes that are published then, those that an ingress makes of it)."""
        self.server.batcher.pool.drop_prefixes()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        response = self.server.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        self.server.wait_until_idle()
        return set(as_numbers(self.reporter.stats()["prefixes"])), self.made(path, body, key)

    def made(self, path, body, key=None):
        authorization = None if key is None else f"Bearer {key}"
        return list(as_numbers(self.hashes.of(path, json.dumps(body).encode(), authorization)))


def replica_of(batcher, **options):
    options = ServeOptions(salt_secret=SECRET, **options)
    reporter = Reporter(batcher, SECRET)
    with served(batcher, options) as server:
        yield Replica(server, reporter, PromptHashes(serve_models.tokenizer(), options, BLOCK))
    reporter.close()
    assert not any(isinstance(each, PublishedPrefixes) for each in batcher.pool.prefixes.index.watchers)


def long_batcher():
    """Its model has room for tools."""
    tokens = serve_models.tokenizer()
    model = tiny_models.make("llama", vocab_size=len(tokens), max_position_embeddings=1024)
    return ContinuousBatcher(model, tokens, num_blocks=512, block_size=BLOCK)


@pytest.fixture(scope="module")
def replica():
    with long_batcher() as batcher:
        yield from replica_of(batcher)


@pytest.fixture(scope="module")
def guarded():
    with long_batcher() as batcher:
        yield from replica_of(batcher, api_keys=KEYS)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_replica_publishes_what_the_ingress_has_made_of_the_body(replica, path, body):
    published, made = replica.ask(path, body)
    assert len(made) >= 5
    assert set(made) <= published
    if not isinstance(body.get("prompt"), list) or isinstance(body["prompt"][0], int):
        assert len(published - set(made)) <= 1  # a block that ends in the answer


def test_one_tenants_prompt_matches_none_of_anothers(guarded):
    path, body = BODIES[3]
    published, made = guarded.ask(path, body, KEYS["red"])
    assert set(made) <= published
    assert len(made) >= 5
    assert not published & set(guarded.made(path, body, KEYS["blue"]))
    assert not published & set(guarded.made(path, body | {"cache_salt": "x"}, KEYS["red"]))


def test_a_salt_of_the_clients_own_is_part_of_the_hash(replica):
    path, body = BODIES[3]
    published, made = replica.ask(path, body | {"cache_salt": "x"})
    assert set(made) <= published
    assert not published & set(replica.made(path, body))
    assert not published & set(replica.made(path, body | {"cache_salt": "y"}))


def test_each_adapter_has_prefixes_of_its_own(tmp_path):
    adapted.make({"first": LORA["first"]}, vocab_size=len(serve_models.tokenizer())).save_pretrained(tmp_path)
    folders = {"first": str(tmp_path / "first")}
    model = load_adapters(tiny_models.make("llama", vocab_size=len(serve_models.tokenizer())), folders)
    with ContinuousBatcher(model, serve_models.tokenizer(), num_blocks=128, block_size=BLOCK) as batcher:
        for found in replica_of(batcher, adapters=folders, served_model_names=("tiny",)):
            path, body = BODIES[3]
            for name, other in (("first", "tiny"), ("tiny", "first")):
                published, made = found.ask(path, body | {"model": name})
                assert set(made) <= published
                assert not published & set(found.made(path, body | {"model": other}))


def test_what_is_evicted_into_host_memory_is_still_told_and_comes_after_what_is_in_the_pool():
    prompts = [list(range(start, start + 33)) for start in (3, 100, 200, 300)]
    with serve_models.batcher(num_blocks=24, block_size=BLOCK, swap_space="1MiB") as batcher:
        reporter = Reporter(batcher, SECRET)
        hashes = PromptHashes(None, ServeOptions(salt_secret=SECRET), BLOCK)
        batcher.generate(prompts[0], max_new_tokens=1)
        for prompt in prompts[1:]:
            batcher.generate(prompt, max_new_tokens=1)
        assert batcher.pool.stats().prefix_evictions > 0
        told = list(as_numbers(reporter.stats()["prefixes"]))
        made = [
            list(as_numbers(hashes.of("/v1/completions", json.dumps({"prompt": each}).encode()))) for each in prompts
        ]
        assert set().union(*made) == set(told)
        assert set(told[:8]) == set(made[3])
        in_pool = batcher.pool.prefixes.index.num_blocks
        assert made[0][-1] in told[in_pool:]
        batcher.pool.drop_prefixes()
        assert reporter.stats()["prefixes"] == b""
        reporter.close()
        batcher.generate(prompts[0], max_new_tokens=1)
        assert reporter.stats()["prefixes"] == b""


REFUSED = [
    ("/v1/chat/completions", b"no json"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 7}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ x }}"}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": 7}'),
    ("/v1/completions", b'{"prompt": []}'),
    ("/v1/completions", b'{"prompt": [99999999999999999999]}'),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/responses", b'{"input": 7}'),
    ("/v1/models", b""),
    ("/tokenize", b'{"prompt": "x"}'),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_a_request_that_is_refused_or_has_no_prompt_has_no_hashes(replica, path, body):
    assert replica.hashes.of(path, body) == b""


@pytest.mark.parametrize("error", [ZeroDivisionError("by a template"), RuntimeError("Already borrowed")])
def test_whatever_a_tokenizer_raises_it_fails_no_request(error):
    def tokenizer(text, **_):
        raise error

    hashes = PromptHashes(tokenizer, ServeOptions(salt_secret=SECRET), BLOCK)
    assert hashes.of("/v1/completions", b'{"prompt": "the quick brown fox"}') == b""


def test_a_wrong_key_has_no_hashes(guarded):
    path, body = BODIES[3]
    assert guarded.made(path, body, "of nobody") == []
    assert guarded.made(path, body) == []


def test_without_a_tokenizer_token_ids_are_hashed_and_texts_are_not():
    hashes = PromptHashes(None, ServeOptions(salt_secret=SECRET), BLOCK)
    assert len(hashes.of("/v1/completions", b'{"prompt": [1, 2, 3, 4, 5]}')) == 8
    assert hashes.of("/v1/completions", b'{"prompt": "the quick brown fox jumps over"}') == b""


def test_a_secret_that_each_process_would_make_for_itself_is_refused():
    with pytest.raises(ValueError, match="secret"):
        PromptHashes(None, ServeOptions(), BLOCK)


def test_the_tokenizer_of_an_ingress_comes_without_the_code_of_models():
    """Which takes seconds, and an ingress has no model."""
    reached, left = set(), {"tokenizer_loading"}
    while left:
        name = left.pop()
        reached.add(name)
        source = (ROOT / "hfpaged" / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        left |= {i.module for i in imports_of(source) if i.is_own and not i.is_late} - reached
    assert {floor_of(name) for name in reached} == {0, 4}
