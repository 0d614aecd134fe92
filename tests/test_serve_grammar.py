"""Answers that are held to a format: whoever ends, ends as the grammar wants it, in any company."""

from __future__ import annotations

import builtins
import functools
import json

import jsonschema
import pytest
import tiny_models
import tiny_tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.serve.grammar import grammar_of, json_grammar, lark_grammar
from hfpaged.serve.grammar_processor import grammar_processor
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.tool_grammar import behind_thought, either

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
VOCAB = 410  # more than the tokenizer has: models pad their vocabulary
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = {"do_sample": True, "seed": 5}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizers.byte_level()


@pytest.fixture(scope="module")
def model():
    model = tiny_models.make("llama", vocab_size=VOCAB, eos_token_id=EOS)
    model.generation_config.eos_token_id = EOS
    yield model
    hfpaged.unpatch(model)


@pytest.fixture(params=[{"num_blocks": 200}, {"num_blocks": 54, "max_num_seqs": 16}], ids=["roomy", "preempting"])
def batcher(model, tokenizer, request):
    with ContinuousBatcher(model, tokenizer, block_size=8, prepack=False, **request.param) as batcher:
        yield batcher
        batcher.pool.check_integrity()
        assert batcher.pool.num_free == batcher.pool.num_blocks


def run(batcher, asked):
    """The outputs of prompts with settings, all at once."""
    found = {}
    for number, (prompt, arguments) in enumerate(asked):
        settings = {"max_new_tokens": 40, **arguments}
        batcher.add_request(prompt, listener=lambda out, n=number: found.update({n: out}), **settings)
    while batcher.has_work:
        batcher.step()
    return [found[number] for number in range(len(asked))]


def check(schema, output):
    """Returns how many sequences have ended."""
    ended = 0
    for seq in output.sequences:
        assert seq.finish_reason in ("stop", "length")
        if seq.finish_reason == "stop":
            jsonschema.validate(json.loads(seq.text), schema)
            ended += 1
    return ended


@pytest.mark.parametrize("arguments", [{}, SAMPLED, {**SAMPLED, "n": 3}, {**SAMPLED, "n": 2, "best_of": 3},
                                       {"num_beams": 3}, {"num_beams": 3, "n": 2}])  # fmt: skip
def test_what_ends_is_valid_and_neighbours_get_what_they_would_get_alone(batcher, model, tokenizer, arguments):
    processor = grammar_processor(tokenizer, model, json_grammar(PERSON))
    free = [("the quick brown", {}), ("lazy dog", SAMPLED), ("naïve café", {"repetition_penalty": 1.3})]
    alone = [run(batcher, [one])[0].token_ids for one in free]
    held = ("who is it?", {**arguments, "logits_processor": processor, "max_new_tokens": 120})
    outputs = run(batcher, [free[0], held, free[1], held, free[2]])
    assert [outputs[place].token_ids for place in (0, 2, 4)] == alone
    for place in (1, 3):
        assert check(PERSON, outputs[place]) == len(outputs[place].sequences)
    assert outputs[1].token_ids == outputs[3].token_ids


def test_tokens_are_those_that_it_gets_without_preemption(model, tokenizer):
    """The processor is given its history again after a recompute."""
    tokens = []
    for sizes in ({"num_blocks": 300}, {"num_blocks": 24, "max_num_seqs": 32}):
        with ContinuousBatcher(model, tokenizer, block_size=8, prepack=False, **sizes) as batcher:
            processor = grammar_processor(tokenizer, model, json_grammar({"type": "object"}))
            held = [(text, {"logits_processor": processor, **SAMPLED, "max_new_tokens": 60}) for text in "abcdefgh"]
            outputs = run(batcher, held)
            tokens.append([out.token_ids for out in outputs])
            preempted = sum(out.metrics.preemptions for out in outputs)
            for out in outputs:
                check({"type": "object"}, out)
    assert preempted
    assert tokens[0] == tokens[1]


def test_drafts_of_prompt_lookup_change_nothing(model, tokenizer):
    with ContinuousBatcher(model, tokenizer, num_blocks=200, prepack=False) as batcher:
        processor = grammar_processor(tokenizer, model, json_grammar({"type": "array", "items": {"enum": [1, 22]}}))
        plain = {"logits_processor": processor, "max_new_tokens": 50}
        prompt = "[1, 22, 1, 22, 22, 1, 1, 22, 1"
        outputs = run(batcher, [(prompt, plain), (prompt, {**plain, "prompt_lookup_num_tokens": 4})])
        assert outputs[1].metrics.draft_tokens > 0
        assert outputs[0].token_ids == outputs[1].token_ids


SCALARS = st.sampled_from([
    {"type": "string", "maxLength": 6}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["red", "green", 3, None]}, {"const": "x"}, {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": "number", "minimum": -2, "maximum": 2}, {"type": "string", "format": "date"},
])  # fmt: skip


def _objects(inner):
    names = st.lists(st.sampled_from(["a", "b", "naïve", "with space"]), unique=True, max_size=3)
    return names.flatmap(
        lambda keys: st.tuples(*[inner for _ in keys]).map(
            lambda values: {
                "type": "object", "properties": dict(zip(keys, values, strict=True)), "required": list(keys),
                "additionalProperties": False,
            }
        )
    )  # fmt: skip


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        _objects(inner), inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=4,
)  # fmt: skip


def test_random_schemas(model, tokenizer):
    ends = []
    with ContinuousBatcher(model, tokenizer, num_blocks=400, prepack=False) as batcher:

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        @given(SCHEMAS, st.integers(0, 1000))
        def holds(schema, seed):
            processor = grammar_processor(tokenizer, model, json_grammar(schema))
            arguments = {"logits_processor": processor, "max_new_tokens": 80}
            sampled = {**arguments, "do_sample": True, "seed": seed, "temperature": 1.5}
            outputs = run(batcher, [("a", arguments), ("b", {**sampled, "n": 2})])
            ends.append(sum(check(schema, out) for out in outputs))

        holds()
    assert sum(ends) > len(ends)  # of three sequences each: it is not that all were cut


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_regex": "(ab|cd){2}x?"}, lambda text: text in {a + b + c for a in ("ab", "cd") for b in ("ab", "cd")
                                                                 for c in ("", "x")}),
        ({"guided_choice": ["yes", 'n"o', "perhaps\n"]}, lambda text: text in ("yes", 'n"o', "perhaps\n")),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"guided_grammar": 'start: "x" ("y" | "z") "."'}, lambda text: text in ("xy.", "xz.")),
        ({"guided_json": json.dumps(PERSON)}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
        ({"structured_outputs": {"json": PERSON}}, lambda text: json.loads(text)["age"] <= 150),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
         lambda text: json.loads(text)["age"] <= 150),
        ({"response_format": {"type": "json_schema", "name": "person", "schema": PERSON}},
         lambda text: json.loads(text)["age"] <= 150),
    ],
)  # fmt: skip
def test_each_way_to_ask_for_a_format(model, tokenizer, fields, fits):
    with ContinuousBatcher(model, tokenizer, num_blocks=200, prepack=False) as batcher:
        processor = grammar_processor(tokenizer, model, grammar_of(fields))
        for arguments in ({}, SAMPLED):
            output = run(batcher, [("x", {"logits_processor": processor, "max_new_tokens": 150, **arguments})])[0]
            assert output.finish_reason == "stop"
            assert fits(output.text)


@pytest.mark.parametrize("arguments", [{"min_tokens": 30}, {"logit_bias": {EOS: -float("inf")}}])
def test_a_complete_answer_ends_whatever_else_is_asked(model, tokenizer, arguments):
    with ContinuousBatcher(model, tokenizer, num_blocks=200, prepack=False) as batcher:
        processor = grammar_processor(tokenizer, model, grammar_of({"guided_choice": ["ab"]}))
        output = run(batcher, [("x", {"logits_processor": processor, **arguments})])[0]
        assert (output.text, output.finish_reason) == ("ab", "stop")


def test_any_history_gives_what_a_fresh_processor_gives(model, tokenizer):
    fresh = grammar_processor(tokenizer, model, json_grammar({"type": "array"}))
    kept = fresh.for_sequence(2)
    good = tokenizer('["quick", 1, {"b": null}, [22]]')["input_ids"]
    generator = torch.Generator().manual_seed(0)
    scores = torch.zeros(1, VOCAB)
    seen = set()
    for _ in range(300):
        length, tail = torch.randint(0, len(good) + 1, (2,), generator=generator).tolist()
        noise = torch.randint(0, 402, (tail % 4,), generator=generator).tolist() if tail % 2 else []
        history = torch.tensor([[7, 8, *good[:length], *noise]])
        found = kept(history, scores)
        assert torch.equal(found, fresh.for_sequence(2)(history, scores))
        seen.add(int(found.isfinite().sum()))
    assert len(seen) > 5


def test_the_end_comes_exactly_where_the_grammar_accepts(model, tokenizer):
    processor = grammar_processor(tokenizer, model, grammar_of({"guided_regex": "a(bc)*"}))
    for text, may_end in (("", False), ("a", True), ("ab", False), ("abc", True)):
        history = torch.tensor([tokenizer(text)["input_ids"]], dtype=torch.int64).view(1, -1)
        scores = processor(history, torch.zeros(1, VOCAB))
        assert bool(scores[0, EOS] == 0) is may_end
        assert bool((scores[0, len(tokenizer) :] == -torch.inf).all())
    ended = torch.tensor([[*tokenizer("a")["input_ids"], EOS]])
    assert processor(ended, torch.zeros(1, VOCAB)).isfinite().nonzero().tolist() == [[0, EOS]]


def test_many_choices_can_be_followed(model, tokenizer):
    """As rules, more than 2000 were ended in the middle, as if that were right."""
    words = [f"word {number}" for number in range(5000)]
    for more in ([], [""]):
        processor = grammar_processor(tokenizer, model, grammar_of({"guided_choice": words + more}))
        with ContinuousBatcher(model, tokenizer, num_blocks=200, prepack=False) as batcher:
            bias = {tokenizer("w")["input_ids"][0]: 100.0}
            output = run(batcher, [("x", {"logits_processor": processor, "max_new_tokens": 60, "logit_bias": bias})])[0]
        assert output.text in words
        assert output.finish_reason == "stop"


def test_what_exceeds_the_limits_is_told_and_no_end_of_the_answer(model, tokenizer):
    rules = "start: " + " | ".join(f'"word {number}"' for number in range(3000))
    processor = grammar_processor(tokenizer, model, grammar_of({"guided_grammar": rules})).for_sequence(0)
    history = torch.tensor([tokenizer("word 17")["input_ids"]])
    processor(history[:, :0], torch.zeros(1, VOCAB))
    with pytest.raises(ApiError, match="simpler") as caught:
        processor(history, torch.zeros(1, VOCAB))
    assert caught.value.status == 422


def test_text_and_no_format_are_free():
    assert grammar_of({}) is None
    assert grammar_of({"response_format": {"type": "text"}, "guided_json": None}) is None
    assert grammar_of({"structured_outputs": {"json_object": False}}) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        ({"response_format": "json"}, "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "needs a `schema`"),
        ({"response_format": False}, "text, json_object or json_schema"),
        ({"structured_outputs": 0}, "is an object"),
        ({"guided_choice": []}, "one or more texts"),
        ({"guided_choice": "yes"}, "one or more texts"),
        ({"guided_json": "{"}, "no JSON"),
        ({"guided_json": "[]"}, "an object, not list"),
        ({"guided_regex": 5}, "is text, not int"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "asks for 2"),
        ({"guided_regex": "a" * 70000}, "may have 65536"),
        ({"guided_json": {"properties": {str(number): {} for number in range(1001)}}}, "may have 1000"),
        ({"guided_json": {"items": [{"anyOf": [{}] * 1001}]}}, "may have 1000"),
        ({"guided_json": functools.reduce(lambda inner, _: {"items": inner}, range(200), {})}, "100 levels"),
    ],
)
def test_what_is_no_format_is_refused(fields, words):
    with pytest.raises(ApiError, match=words) as caught:
        grammar_of(fields)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        {"guided_json": {"$ref": "#/nowhere"}},
        {"guided_regex": "(?<=a)b"},
        {"guided_grammar": "start: nothing"},
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(model, tokenizer, fields):
    with pytest.raises(ApiError, match=r"objekt|nowhere|look-around|unknown name") as caught:
        grammar_processor(tokenizer, model, grammar_of(fields))
    assert caught.value.status == 400


def test_a_tokenizer_that_cannot_be_used_is_named(model):
    with pytest.raises(ApiError, match="decoder") as caught:
        grammar_processor(tiny_tokenizers.word_piece(), model, lark_grammar('start: "a"'))
    assert caught.value.status == 422


def test_without_the_library_the_remedy_is_told(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ApiError, match=r"hfpaged\[serve\]") as caught:
        grammar_of({"response_format": {"type": "json_object"}})
    assert caught.value.status == 422


@pytest.mark.demo_model
def test_the_demo_model_fills_in_a_schema(demo):
    model, tokenizer = demo
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}, "country": {"type": "string"}},
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    asked = [{"role": "user", "content": "What is the capital of France? Answer in JSON: capital, country."}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    with ContinuousBatcher(model, tokenizer, num_blocks=100, prepack=False) as batcher:
        processor = grammar_processor(tokenizer, model, json_grammar(schema))
        output = run(batcher, [(prompt, {"logits_processor": processor, "do_sample": False})])[0]
    hfpaged.unpatch(model)
    assert output.finish_reason == "stop"
    answer = json.loads(output.text)
    assert (answer["capital"], answer["country"].lower()) == ("Paris", "france")


@pytest.mark.parametrize(("is_open", "texts"), [
    (True, {"Hm {.\n</think>\n\n[1]": True, "[1]": False, "Hm </think>[1] x": False, "</think>[1]": True}),
    (False, {"<think>\nHm.</think>\n[1]": True, "[1]": True, "Hm.</think>[1]": False, "<think>a</think>": False}),
])  # fmt: skip
@pytest.mark.parametrize("answer", [json_grammar({"type": "array"}), either("start: /[a-z]+/", "start: /\\[1\\]/")])
@pytest.mark.parametrize("is_special", [False, True])
def test_a_model_may_think_before_it_is_held_to_a_format(model, is_open, texts, answer, is_special):
    plain = tiny_tokenizers.byte_level().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=type(plain).from_str(plain.to_str()), eos_token="</s>")
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    grammar = behind_thought(tokenizer, answer, ("<think>", "</think>"), is_open=is_open)
    for text, fits in texts.items():
        processor = grammar_processor(tokenizer, model, grammar)
        ids = tokenizer(text)["input_ids"]
        allowed = [processor(torch.tensor([ids[:end]], dtype=torch.int64), torch.zeros(1, VOCAB))[0] == 0
                   for end in range(len(ids) + 1)]  # fmt: skip
        follows = all(bool(here[token]) for here, token in zip(allowed, ids, strict=False))
        assert (follows and bool(allowed[-1][EOS])) is fits, text
