"""What a request asks for comes out of arguments, defaults and generate()'s own rules; nonsense is refused in words."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import tiny_models
import tiny_tokenizers
import torch
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from hfpaged.engine import param_rules
from hfpaged.engine.own_params import NAMES
from hfpaged.engine.params import resolve_params
from hfpaged.engine.processors import build_processors
from hfpaged.errors import InvalidConfigError

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def model():
    """A copy whose generation_config a test may change."""
    shared = tiny_models.shared("llama")
    model = copy.copy(shared)
    model.generation_config = copy.deepcopy(shared.generation_config)
    return model


def resolve(model, config=None, tokenizer=None, **arguments):
    return resolve_params(model, tokenizer, len(PROMPT), config, **arguments)


class Caught(Exception):
    """Carries what generate() works with out of it."""


def generates_with(model, config=None, **arguments):
    """The judge: the GenerationConfig that generate() itself arrives at."""

    def catch(model, input_ids, generation_config, **rest):
        raise Caught(generation_config)

    with pytest.raises(Caught) as caught:
        model.generate(torch.tensor([PROMPT]), generation_config=config, custom_generate=catch, **arguments)
    return caught.value.args[0]


def plain(config):
    """A config as numbers and lists."""
    values = {name: value for name, value in vars(config).items() if name != "_mask_length"}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


DEFAULTS = [
    {},
    {"eos_token_id": [3, 4], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 50},
    {"max_new_tokens": 7, "repetition_penalty": 1.2, "min_new_tokens": 2, "eos_token_id": 2},
    {"min_length": 9, "eos_token_id": 2, "pad_token_id": 2},
]
ARGUMENTS = [
    {},
    {"max_new_tokens": 5},
    {"max_length": 11},
    {"do_sample": True, "top_k": 5, "num_return_sequences": 3},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": "never"},
    {"eos_token_id": None, "min_length": 6},
    {"eos_token_id": 9, "do_sample": False, "temperature": None},
    {"min_new_tokens": 3, "max_new_tokens": 9, "pad_token_id": 1},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("as_config", [True, False], ids=["config", "arguments"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("defaults", DEFAULTS, ids=str)
def test_settings_are_those_that_generate_arrives_at(model, defaults, arguments, as_config):
    for name, value in defaults.items():
        setattr(model.generation_config, name, value)
    given = {"config": GenerationConfig(**arguments)} if as_config else arguments
    expected, params = generates_with(model, **given), resolve(model, **given)
    assert plain(params.config) == plain(expected)
    assert params.max_new_tokens == expected.max_length - len(PROMPT)
    eos = expected._eos_token_tensor
    assert params.eos_token_ids == (() if eos is None else tuple(eos.tolist()))
    assert params.stop_token_ids == set(params.eos_token_ids)
    assert params.pad_token_id == (None if expected._pad_token_tensor is None else int(expected._pad_token_tensor))
    assert (params.n, params.num_beams) == (expected.num_return_sequences, expected.num_beams)
    assert params.min_new_tokens == max(0, expected.min_length - len(PROMPT))


def test_nothing_that_was_given_is_changed(model):
    config, arguments = GenerationConfig(max_new_tokens=3), {"stop": ["x"], "n": 1}
    before = copy.deepcopy((model.generation_config.to_dict(), config.to_dict(), arguments))
    resolve_params(model, tiny_tokenizers.byte_level(), 4, config, **arguments)
    resolve_params(model, tiny_tokenizers.byte_level(), 4, arguments)
    assert (model.generation_config.to_dict(), config.to_dict(), arguments) == before


def test_a_dict_may_hold_all_names_and_arguments_stand_above_it(model):
    params = resolve(model, {"max_tokens": 9, "seed": 3, "logprobs": 2, "do_sample": True}, max_tokens=4, seed=None)
    assert (params.max_new_tokens, params.logprobs) == (4, 2)
    assert params.seed is not None
    assert params.seed != 3


def test_names_of_openai_are_names_of_transformers(model):
    params = resolve(model, max_tokens=6, min_tokens=2, n=3, do_sample=True, eos_token_id=2)
    assert (params.max_new_tokens, params.min_new_tokens, params.n, params.num_sequences) == (6, 2, 3, 3)
    assert resolve(model, n=2, num_return_sequences=2, do_sample=True).n == 2


def test_temperature_0_is_greedy(model):
    for arguments in ({"temperature": 0}, {"temperature": 0.0, "do_sample": True, "seed": 4}):
        params = resolve(model, **arguments)
        assert not params.do_sample
        assert not build_processors(model, params, PROMPT)


def test_whole_numbers_are_numbers(model):
    params = resolve(model, temperature=2, repetition_penalty=3, do_sample=True, top_k=0)
    assert [type(p).__name__ for p in build_processors(model, params, PROMPT)] == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
    ]


def test_ignore_eos_is_generating_without_an_end_of_sequence_token(model):
    model.generation_config.eos_token_id = [2, 3]
    params = resolve(model, ignore_eos=True, min_new_tokens=3)
    assert (params.eos_token_ids, params.stop_token_ids) == ((), frozenset())
    assert not build_processors(model, params, PROMPT)


def test_best_of_says_how_many_are_sampled(model):
    params = resolve(model, n=2, best_of=5, do_sample=True)
    assert (params.n, params.num_sequences, params.num_logprobs) == (2, 5, 0)
    assert resolve(model, n=2, do_sample=True).num_logprobs is None
    assert resolve(model, n=2, best_of=5, do_sample=True, logprobs=4).num_logprobs == 4


def test_stop_strings_come_from_both_names(model):
    tokenizer = tiny_tokenizers.byte_level()
    params = resolve(model, tokenizer=None)
    assert params.stop_strings == ()
    params = resolve_params(model, tokenizer, 4, stop="a", stop_strings=["b", "a"], include_stop_str_in_output=True)
    assert params.stop_strings == ("b", "a")
    assert params.include_stop_str_in_output


def test_own_criteria_say_when_it_ends(model):
    params = resolve(model, stopping_criteria=[EosTokenCriteria([7, 8]), MaxLengthCriteria(14)], eos_token_id=2)
    assert (params.stop_token_ids, params.eos_token_ids, params.max_new_tokens) == ({7, 8}, (2,), 10)
    assert resolve(model, stopping_criteria=MaxLengthCriteria(2)).max_new_tokens == 1


def test_params_are_frozen(model):
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve(model).seed = 3


WRONG = [
    ({"temprature": 1.0}, "temprature= is no argument .* did you mean temperature"),
    ({"nonsense_of_all_kinds": 1}, "nonsense_of_all_kinds= is no argument .* use the names of transformers"),
    ({"validate": 1}, "validate= is no argument"),
    ({"temperature": -0.1}, "temperature=-0.1 cannot be: it is a number of at least 0; use 0 for greedy"),
    ({"temperature": float("nan")}, "temperature=nan cannot be"),
    ({"temperature": "hot"}, "temperature='hot' cannot be: it is a number"),
    ({"top_p": 0}, "top_p=0 cannot be: it is a number above 0 and at most 1; use do_sample=False"),
    ({"top_p": 1.1}, "top_p=1.1 cannot be"),
    ({"top_k": -1}, "top_k=-1 cannot be: it is a whole number of at least 0; use 0 to switch it off"),
    ({"top_k": 2.5}, "top_k=2.5 cannot be: it is a whole number"),
    ({"min_p": 2}, "min_p=2 cannot be: it is a number from 0 to 1"),
    ({"typical_p": 0}, "typical_p=0 cannot be"),
    ({"top_h": 1.5}, "top_h=1.5 cannot be"),
    ({"epsilon_cutoff": 1.0}, "epsilon_cutoff=1.0 cannot be"),
    ({"eta_cutoff": -1}, "eta_cutoff=-1 cannot be"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 cannot be"),
    ({"max_new_tokens": 0}, "max_new_tokens=0 cannot be: it is a whole number of at least 1"),
    ({"max_tokens": True}, "max_new_tokens=True cannot be"),
    ({"max_length": 4}, "the prompt has 4 tokens and max_length is 4 with the prompt"),
    ({"n": 0}, "n=0 cannot be"),
    ({"n": 2}, "generate.. refuses these settings: Greedy methods"),
    ({"n": 2, "do_sample": True, "temperature": 0}, "n=2, best_of=None of a greedy request"),
    ({"best_of": 2}, "n=1, best_of=2 of a greedy request"),
    ({"n": 3, "best_of": 2, "do_sample": True}, "best_of=2 sequences with n=3"),
    ({"best_of": 4, "num_beams": 4}, "best_of=4 sequences with n=1 and num_beams=4"),
    ({"n": 3, "num_beams": 2}, r"num_return_sequences` \(3\) has to be smaller or equal to `num_beams`"),
    ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens=3 and max_new_tokens=4 are two names of one thing"),
    ({"n": 3, "num_return_sequences": 2, "do_sample": True}, "n=3 and num_return_sequences=2 are two names"),
    ({"seed": 2**64}, "seed=18446744073709551616 cannot be: .* 64 bits"),
    ({"seed": 1.5}, "seed=1.5 cannot be"),
    ({"logprobs": -1}, "logprobs=-1 cannot be"),
    ({"logprobs": True}, "logprobs=True cannot be"),
    ({"prompt_logprobs": -2}, "prompt_logprobs=-2 cannot be"),
    ({"frequency_penalty": 2.1}, "frequency_penalty=2.1 cannot be: it is a number from -2 to 2"),
    ({"presence_penalty": -3}, "presence_penalty=-3 cannot be"),
    ({"logit_bias": {101: 1.0}}, "logit_bias names token 101, and the model has tokens 0 to 100"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias names token '5'"),
    ({"logit_bias": {5: float("nan")}}, "logit_bias has nan for token 5"),
    ({"stop": ["a"]}, r"stop strings \['a'\] are compared with text, and there is no tokenizer"),
    ({"stop": [""]}, "stop has '', which ends no text"),
    ({"stop_strings": ["a", 3]}, "stop_strings has 3, which ends no text"),
    ({"max_time": 0}, "max_time=0 cannot be"),
    ({"early_stopping": "soon"}, "generate.. refuses these settings: .*early_stopping"),
    ({"num_beams": 0}, "num_beams=0 cannot be"),
    ({"suppress_tokens": [3], "forced_eos_token_id": 3}, "generate.. refuses these settings"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_what_cannot_be_is_refused_in_words(model, arguments, words):
    with pytest.raises(InvalidConfigError, match=words):
        resolve(model, **arguments)
    with pytest.raises(InvalidConfigError, match=words):
        resolve(model, arguments)


@pytest.mark.parametrize(
    "name",
    [
        *("assistant_model", "cache_implementation", "past_key_values", "penalty_alpha", "dola_layers", "constraints"),
        *("force_words_ids", "guidance_scale", "negative_prompt_ids", "streamer", "return_dict_in_generate"),
        *("output_scores", "output_logits", "output_attentions", "use_cache", "num_beam_groups", "token_healing"),
        *("prefill_chunk_size", "custom_generate", "tokenizer", "input_ids"),
    ],
)
def test_what_is_not_for_one_request_is_refused_by_name(model, name):
    value = False if name == "use_cache" else torch.ones(2) if name.endswith("ids") else 4
    with pytest.raises(InvalidConfigError, match=f"{name}= is not for one request among others; ."):
        resolve(model, {name: value})


def test_what_asks_for_nothing_is_not_refused(model):
    for name, (neutral, _) in param_rules.REFUSED.items():
        for value in neutral:
            assert resolve(model, {name: value}).max_new_tokens == 20


@pytest.mark.parametrize("changes", [{"guidance_scale": 1.5}, {"dola_layers": "low"}, {"penalty_alpha": 0.6}], ids=str)
def test_other_ways_to_generate_are_refused_wherever_they_come_from(model, changes):
    with pytest.raises(InvalidConfigError, match="is not for one request"):
        resolve(model, GenerationConfig(**changes))
    vars(model.generation_config).update(changes)
    with pytest.raises(InvalidConfigError, match="is not for one request"):
        resolve(model)


def test_what_a_config_says_of_the_cache_and_of_outputs_is_passed_over(model):
    config = GenerationConfig(cache_implementation="static", return_dict_in_generate=True, output_scores=True)
    assert resolve(model, config).max_new_tokens == 20


@pytest.mark.parametrize(
    "arguments",
    [{"exponential_decay_length_penalty": (1, 1.1)}, {"bad_words_ids": 7}, {"sequence_bias": {"a": 1}}],
    ids=str,
)
def test_what_a_processor_refuses_is_refused_before_the_first_step(model, arguments):
    with pytest.raises(InvalidConfigError, match="a logits processor refuses its settings"):
        build_processors(model, resolve(model, **arguments), PROMPT)


def test_every_name_is_known_once():
    assert not NAMES & param_rules.KNOWN
    assert not NAMES & set(param_rules.REFUSED)
    assert set(param_rules.BOUNDS) <= param_rules.KNOWN | NAMES | {"n"}
