"""A sequence ends where generate() ends it."""

from __future__ import annotations

import pytest
import tiny_models
import tiny_tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from hfpaged.engine.params import resolve_params
from hfpaged.engine.stop_strings import TokenStopStrings, first_stop, may_become_stop
from hfpaged.engine.stopping import Stop, StopConditions
from hfpaged.errors import CallbackError

STRINGS = ["stop", "op", "s", "e", ". ", "st o", " the", "the ", "你好", "好", "é", "🙂", "<|end|>", "</s>", "aa", "▁"]
slow = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def conditions(prompt_length=3, **arguments):
    tokenizer = tiny_tokenizers.byte_level()
    params = resolve_params(
        tiny_models.shared("llama"),
        tokenizer,
        prompt_length,
        **{"max_new_tokens": 5, "eos_token_id": [2, 4]} | arguments,
    )
    return StopConditions(params, tokenizer)


@pytest.mark.parametrize(
    ("tokens", "stop"),
    [
        ([2, 4, 2, 9], None),
        ([2, 4, 2, 4], Stop("stop", 4)),
        ([9, 9, 9, 9, 2], Stop("stop", 2)),
        ([9, 9, 9, 2, 9, 9, 9], None),
        ([9] * 8, Stop("length")),
        ([9] * 7 + [2], Stop("stop", 2)),
    ],
)
def test_the_last_token_ends_a_sequence_or_their_number_does(tokens, stop):
    assert conditions().check(tokens) == stop


def test_with_ignore_eos_only_the_number_of_tokens_ends_it():
    assert conditions(ignore_eos=True).check([9, 9, 9, 2]) is None
    assert conditions(ignore_eos=True).check([9, 9, 9, 2, 2, 2, 2, 2]) == Stop("length")


@pytest.mark.parametrize("kind", tiny_tokenizers.ALL)
@slow
@given(data=st.data(), strings=st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3, unique=True))
def test_stop_strings_are_found_where_transformers_finds_them(kind, data, strings):
    tokenizer = tiny_tokenizers.ALL[kind]()
    words = st.sampled_from(["sto", "st", "stop", " the", "the ", "你", "好", "🙂", "aa", "a", "é", ".", "<|end|>"])
    text = st.lists(words, min_size=1, max_size=9).map(lambda parts: tokenizer.encode("".join(parts)))
    any_tokens = st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=12)
    token_ids = data.draw(st.one_of(text, any_tokens))
    try:
        judge = StopStringCriteria(tokenizer, strings)
    except ValueError:
        return  # no token has anything of these
    ours = TokenStopStrings(tokenizer, strings)
    for end in range(1, len(token_ids) + 1):
        expected = bool(judge(torch.tensor([token_ids[:end]]), None))
        assert (ours.find(token_ids[:end]) is not None) == expected, tokenizer.convert_ids_to_tokens(token_ids[:end])
    assert ours(torch.tensor([token_ids]), None).tolist() == [expected]


def test_a_stop_string_may_begin_in_the_prompt_and_end_within_a_token():
    tokenizer = tiny_tokenizers.byte_level()
    prompt = tokenizer.encode("a s", add_special_tokens=False)
    token_ids = [*prompt, *tokenizer.convert_tokens_to_ids(["t", "op"])]
    assert tokenizer.decode(token_ids) == "a stop"
    ours = conditions(len(prompt), stop="sto")
    assert ours.check(token_ids[:-1]) is None
    assert ours.check(token_ids) == Stop("stop", "sto")
    assert ours.check([*token_ids, 60]) is None, "it does not reach into the last token"


def test_of_several_strings_the_one_that_is_complete_first_is_named():
    assert first_stop("xabcdx", ["abcd", "bc", "c", "x"]).which == 3
    assert first_stop("xabcdx", ["abcd", "bc", "c"]) == (1, 2, 4)
    assert first_stop("xabcdx", ["abcd", "q"]) == (0, 1, 5)
    assert first_stop("abab", ["ab"], known=2) == (0, 2, 4)
    assert first_stop(b"abab", [b"ba"]) == (0, 1, 3)
    assert first_stop("abab", ["aa"]) is None
    assert first_stop("abab", []) is None


@pytest.mark.parametrize(
    ("text", "stops", "count"),
    [("xab", ["abc"], 2), ("xabc", ["abc"], 0), ("aab", ["aabaac", "bq"], 3), ("aabc", ["cq"], 1), ("a", [], 0)],
)
def test_the_beginning_of_a_stop_string_is_known_by_its_length(text, stops, count):
    assert may_become_stop(text, stops) == count


class Says(StoppingCriteria):
    def __init__(self, answer):
        self.answer, self.seen = answer, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return self.answer


@pytest.mark.parametrize("answer", [True, torch.tensor([True])], ids=["bool", "tensor"])
def test_an_own_criterion_sees_all_tokens_and_ends_the_sequence(answer):
    criterion = Says(answer)
    assert conditions(stopping_criteria=[criterion]).check([9, 9, 9, 9]) == Stop("stop")
    assert criterion.seen == [[[9, 9, 9, 9]]]
    assert conditions(stopping_criteria=[Says(False)]).check([9, 9, 9, 9]) is None


def test_an_own_criterion_that_raises_is_named():
    with pytest.raises(CallbackError, match=r"criterion MaxLengthCriteria2 raised TypeError"):
        conditions(stopping_criteria=[type("MaxLengthCriteria2", (MaxLengthCriteria,), {})(None)]).check([9])


def test_own_criteria_take_the_place_of_those_of_the_same_class():
    own = conditions(stopping_criteria=[EosTokenCriteria([7]), MaxLengthCriteria(6)])
    assert own.check([9, 9, 9, 2]) is None
    assert own.check([9, 9, 9, 7]) == Stop("stop", 7)
    assert own.check([9] * 6) == Stop("length")
    tokenizer = tiny_tokenizers.byte_level()
    strings = conditions(stop_strings=["stop"], stopping_criteria=[StopStringCriteria(tokenizer, "the")])
    assert strings.check([9, 9, 9, *tokenizer.encode("stop")]) is None
    assert strings.check([9, 9, 9, *tokenizer.encode("the")]) == Stop("stop")


def test_time_is_up_after_max_time():
    assert conditions(max_time=1000.0).check([9, 9, 9, 9]) is None
    assert conditions(max_time=1e-9).check([9, 9, 9, 9]) == Stop("length")
    late = MaxTimeCriteria(1.0, initial_timestamp=0.0)
    assert conditions(max_time=1000.0, stopping_criteria=[late]).check([9, 9, 9, 9]) == Stop("length")


def test_a_beam_search_gets_all_but_lengths_and_tokens():
    criterion = Says(True)
    found = conditions(stop=["stop"], stopping_criteria=[criterion, MaxLengthCriteria(9)], max_time=3.0).for_beams
    assert [type(each) for each in found] == [TokenStopStrings, Says, MaxTimeCriteria]


@pytest.mark.demo_model
def test_the_demo_models_stop_strings_are_found_where_transformers_finds_them(demo):
    _, tokenizer = demo
    strings = ["\n\n", " the end", "🙂", "<|im_end|>", "ing"]
    token_ids = tokenizer.encode("I was walking to\n\n the end 🙂 of it<|im_end|>\n thing\n \n\n")
    judge, ours = StopStringCriteria(tokenizer, strings), TokenStopStrings(tokenizer, strings)
    ends = range(1, len(token_ids) + 1)
    expected = [bool(judge(torch.tensor([token_ids[:end]]), None)) for end in ends]
    assert sum(expected) > 5
    assert [ours.find(token_ids[:end]) is not None for end in ends] == expected
