from __future__ import annotations

import dataclasses

import pytest

from hfpaged import cli, demo
from hfpaged.kv_format import FORMATS
from hfpaged.measure import KVBytes

OUTCOME = demo.Outcome([[1, 2], [3, 4]], KVBytes(8_000_000, 10_000_000), "3 of 9")
SECONDS = {demo.PLAIN: [2.0, 2.0, 3.0, 2.2], demo.PAGED: [1.0, 2.5, 1.0, 1.1]}


def test_equal_tokens_earn_a_ratio_of_medians_and_its_spread():
    outcomes = {demo.PLAIN: OUTCOME, demo.PAGED: OUTCOME}
    assert demo.verdict(outcomes, demo.speed(outcomes, SECONDS)) == (
        "Same tokens as plain transformers, at 2.00 times its speed (0.80 to 3.00 in 4 turns), with 1.00 times its KV "
        "memory reserved."
    )


def test_different_tokens_earn_none():
    wrong = dataclasses.replace(OUTCOME, rows=[[1, 2], [3, 5]])
    outcomes = {demo.PLAIN: OUTCOME, demo.PAGED: wrong}
    text = demo.verdict(outcomes, demo.speed(outcomes, SECONDS))
    assert text == "The tokens differ in 1 of 2 rows, so speed and memory are not compared."


def test_a_quantized_cache_earns_no_ratio_and_is_sent_to_the_judge():
    other = dataclasses.replace(OUTCOME, rows=[[1, 2], [3, 5]], kv_bytes=KVBytes(2_000_000, 3_000_000))
    assert demo.quantized_verdict({demo.PLAIN: OUTCOME, demo.PAGED: other}, "int8") == (
        "With keys and values as int8, 1 of 2 rows have the same tokens as plain transformers, in 2.00 MB of KV memory "
        "for 8.00 MB; `hfpaged quality --kv int8` tells what that costs."
    )


def test_an_unknown_format_is_refused_before_the_model_is_loaded(capsys):
    assert cli.main(["demo", "--kv-dtype", "int3"]) == 2
    assert "kv_dtype='int3' is not known" in capsys.readouterr().err


def test_nothing_to_generate_is_refused_before_the_model_is_loaded(capsys):
    assert cli.main(["demo", "--max-new-tokens", "0"]) == 2
    assert "--max-new-tokens 0 generates nothing" in capsys.readouterr().err


@pytest.mark.demo_model
def test_both_caches_give_the_same_answers_and_what_the_chats_have_in_common_is_stored_once(demo_batch):
    model, inputs = demo_batch
    plain = demo.generate_plain(model, inputs, 4)
    paged = demo.generate_paged(model, inputs, 4)
    assert plain.rows == paged.rows
    assert plain.kv_bytes.live * 3 // 4 < paged.kv_bytes.live < plain.kv_bytes.live
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.demo_model
def test_a_quantized_cache_takes_less_than_a_third_of_the_bytes(demo_batch):
    model, inputs = demo_batch
    native, quantized = (demo.generate_paged(model, inputs, 4, FORMATS[name]) for name in ("auto", "int8"))
    assert quantized.blocks.split(" of ")[0] == native.blocks.split(" of ")[0]  # used; more of them fit
    assert quantized.kv_bytes.live < native.kv_bytes.live * 0.27


@pytest.fixture
def demo_batch(request):
    model, tokenizer = request.getfixturevalue("demo")
    return model, demo.chat_inputs(tokenizer, ["Name three fruits.", "What is the capital of France?"])
