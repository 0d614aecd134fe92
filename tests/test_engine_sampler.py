"""Tokens that the sampler chooses are those of generate() for each sequence alone, whatever it samples besides."""

from __future__ import annotations

import functools
from array import array

import pytest
import tiny_models
import tiny_tokenizers
import torch
from sampling_cases import CASES, SAMPLE, SAMPLED_CASES, Shift
from transformers import LogitsProcessor, TopKLogitsWarper

from hfpaged.engine.logprobs import prompt_logprobs
from hfpaged.engine.params import resolve_params
from hfpaged.engine.processors import SequenceProcessors, build_processors
from hfpaged.engine.sampler import Sampled, SampleRow, SequenceSampler, sample, sequence_seed
from hfpaged.engine.stopping import StopConditions
from hfpaged.errors import CallbackError, InvalidLogitsError

PROMPT = [5, 60, 71, 60, 8, 99]
SEED = 1234


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    """A vocabulary as large as the tokenizer's, and logits so small that what is sampled is no foregone matter."""
    model = tiny_models.make("llama", vocab_size=len(tiny_tokenizers.byte_level()))
    model.lm_head.weight.mul_(2 / last_logits(model, PROMPT).std())
    return model


@pytest.fixture(scope="module")
def expected(model):
    """Name of a case -> what generate() makes of it."""
    return functools.cache(lambda name: generated(model, prompt_of(CASES[name]), CASES[name]))


def prompt_of(case):
    """generate() forces the first token behind a prompt of one only."""
    return PROMPT[:1] if "forced_bos_token_id" in case else PROMPT


def generated(model, prompt, case):
    """The judge. Without a cache its forwards have the shapes of those below, so that logits are equal to the bit."""
    torch.manual_seed(SEED)
    case = {"max_new_tokens": 24} | case
    tokenizer = {"tokenizer": tiny_tokenizers.byte_level()} if "stop_strings" in case else {}
    return model.generate(torch.tensor([prompt]), use_cache=False, **tokenizer, **case)[0].tolist()


class Run:
    """A sequence that is sampled until it stops."""

    def __init__(self, model, prompt, case, **own):
        tokenizer = tiny_tokenizers.byte_level()
        arguments = {"max_new_tokens": 24, "seed": SEED} | case | own
        self.params = resolve_params(model, tokenizer, len(prompt), **arguments)
        self.tokens = array("q", prompt)
        self.sampler = SequenceSampler(model, self.params, prompt)
        self.conditions = StopConditions(self.params, tokenizer)
        self.is_done = False

    @property
    def row(self):
        return SampleRow(self.sampler, self.tokens)

    def take(self, sampled):
        assert isinstance(sampled, Sampled), sampled
        self.tokens.append(sampled.token_id)
        self.is_done = self.conditions.check(self.tokens) is not None


def last_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[:, -1]


def run_all(model, runs):
    while active := [run for run in runs if not run.is_done]:
        logits = torch.cat([last_logits(model, run.tokens) for run in active])
        for run, sampled in zip(active, sample([run.row for run in active], logits), strict=True):
            run.take(sampled)
    return [run.tokens.tolist() for run in runs]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_generate(model, expected, name):
    assert run_all(model, [Run(model, prompt_of(CASES[name]), CASES[name])]) == [expected(name)]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_cases_differ_in_what_they_generate(expected):
    """A case that changes nothing would prove nothing."""
    plain = {False: expected("greedy"), True: expected("sampling")}
    same = [name for name in CASES if expected(name) == plain[name in SAMPLED_CASES]]
    assert same == ["greedy", "remove_invalid_values", "sampling"]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_in_any_company_tokens_are_the_same(model, expected):
    order = [*list(CASES)[::-2], *list(CASES)[::2]]
    runs = [Run(model, prompt_of(CASES[name]), CASES[name]) for name in order]
    for name, tokens in zip(order, run_all(model, runs), strict=True):
        assert tokens == expected(name), name


def test_a_seed_gives_the_same_tokens_beside_others_with_the_same_settings(model):
    alone = run_all(model, [Run(model, PROMPT, SAMPLE, seed=7)])
    runs = [Run(model, PROMPT, SAMPLE, seed=seed) for seed in (3, 7, 11)]
    assert run_all(model, runs)[1:2] == alone
    assert len({tuple(run.tokens) for run in runs}) == 3


def test_a_request_without_a_seed_draws_one_of_torchs_own(model):
    torch.manual_seed(5)
    first, second = Run(model, PROMPT, SAMPLE, seed=None), Run(model, PROMPT, SAMPLE, seed=None)
    assert first.params.seed != second.params.seed
    torch.manual_seed(5)
    assert resolve_params(model, None, 4, **SAMPLE).seed == first.params.seed
    again = Run(model, PROMPT, SAMPLE, seed=first.params.seed)
    assert run_all(model, [first]) == run_all(model, [again])
    state = torch.get_rng_state()
    assert resolve_params(model, None, 4).seed is None
    assert torch.equal(torch.get_rng_state(), state), "greedy requests draw nothing"


def test_sampling_leaves_torchs_global_generator_alone(model):
    run = Run(model, PROMPT, SAMPLE)
    state = torch.get_rng_state()
    run_all(model, [run])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_of_several_samples_is_the_one_of_a_single_request(model):
    single = run_all(model, [Run(model, PROMPT, SAMPLE)])[0]
    runs = [Run(model, PROMPT, SAMPLE, n=4) for _ in range(4)]
    for index, run in enumerate(runs):
        run.sampler = runs[0].sampler.fork(index) if index else runs[0].sampler
        assert run.sampler.seed == sequence_seed(SEED, index)
    tokens = run_all(model, runs)
    assert tokens[0] == single
    assert len(set(map(tuple, tokens))) == 4


def test_seeds_of_samples_are_not_those_of_neighbouring_requests():
    seeds = {sequence_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) == 10_000
    assert all(-(2**63) <= seed < 2**64 for seed in seeds)
    assert sequence_seed(-3, 0) == -3
    torch.Generator().manual_seed(sequence_seed(2**64 - 1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [{}, SAMPLE, {"repetition_penalty": 1.5}], ids=str)
def test_logits_of_narrow_dtypes_are_processed_in_float32_and_not_changed(model, dtype, case):
    logits = torch.randn(3, model.config.vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    narrow = sample([Run(model, PROMPT, case).row for _ in range(3)], logits)
    wide = sample([Run(model, PROMPT, case).row for _ in range(3)], logits.float())
    assert narrow == wide
    assert torch.equal(logits, before)


def test_rows_with_equal_settings_share_one_pass(model, monkeypatch):
    seen = []
    original = TopKLogitsWarper.__call__
    monkeypatch.setattr(TopKLogitsWarper, "__call__", lambda *args: seen.append(len(args[2])) or original(*args))
    runs = [Run(model, PROMPT, {"do_sample": True, "top_k": 5}, seed=seed) for seed in range(6)]
    runs += [Run(model, PROMPT, {"do_sample": True, "top_k": 9, "repetition_penalty": 1.2}) for _ in range(2)]
    sample([run.row for run in runs], torch.randn(8, model.config.vocab_size))
    assert sorted(seen) == [2, 6]


def test_a_processor_that_has_nothing_to_do_is_not_called(model):
    case = {"eos_token_id": 3, "min_new_tokens": 2, "forced_eos_token_id": 3, "begin_suppress_tokens": [5]}
    params = resolve_params(model, None, 6, max_new_tokens=10, **case)
    processors = SequenceProcessors(build_processors(model, params, PROMPT))
    names = {length: [type(p).__name__ for p in processors.at(length)] for length in (6, 7, 8, 14, 15, 16)}
    two = ["NoEndBefore", "NoEndBefore"]  # of min_length and of min_new_tokens
    assert names[6] == [*two, "SuppressTokensAtBeginLogitsProcessor"]
    assert names[7] == two
    assert names[8] == names[14] == names[16] == []
    assert names[15] == ["ForcedEOSTokenLogitsProcessor"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [SAMPLE, {**SAMPLE, "top_h": 0.5}, {**SAMPLE, "top_p": 0.5, "min_p": 0.1}], ids=str)
def test_a_row_of_no_numbers_is_an_error_of_its_own_alone(model, bad, case):
    runs = [Run(model, PROMPT, case, seed=seed) for seed in range(4)]
    logits = last_logits(model, PROMPT).repeat(4, 1)
    expected = sample([run.row for run in runs], logits)
    logits[1, 3] = bad
    again = sample([Run(model, PROMPT, case, seed=seed).row for seed in range(4)], logits)
    assert isinstance(again[1], InvalidLogitsError)
    assert again[:1] + again[2:] == expected[:1] + expected[2:]


def test_greedy_rows_of_nan_are_errors_and_their_neighbours_are_not(model):
    logits = torch.randn(3, model.config.vocab_size)
    logits[0, 7], logits[2] = float("nan"), -torch.inf
    first, second, third = sample([Run(model, PROMPT, {}).row for _ in range(3)], logits)
    assert isinstance(first, InvalidLogitsError)
    assert isinstance(third, InvalidLogitsError)
    assert second == Sampled(int(logits[1].argmax()))


def test_remove_invalid_values_makes_numbers_of_nan(model):
    logits = torch.randn(1, model.config.vocab_size)
    logits[0, 7], logits[0, 9] = float("nan"), float("inf")
    assert sample([Run(model, PROMPT, {"remove_invalid_values": True}).row], logits) == [Sampled(9)]


class Raises(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise KeyError("no such word")


class Shrinks(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, 1:]


@pytest.mark.parametrize(
    ("processor", "words"),
    [(Raises(), "Raises raised KeyError: 'no such word'"), (Shrinks(), r"Shrinks gave back .*401.*not scores")],
    ids=["raises", "shrinks"],
)
def test_a_processor_that_fails_is_an_error_of_its_own_request_alone(model, processor, words):
    case = {"repetition_penalty": 1.3}
    runs = [Run(model, PROMPT, case), Run(model, PROMPT, case, logits_processor=[processor]), Run(model, PROMPT, {})]
    results = sample([run.row for run in runs], last_logits(model, PROMPT).repeat(3, 1))
    alone = [sample([run.row], last_logits(model, PROMPT))[0] for run in (runs[0], runs[2])]
    assert [results[0], results[2]] == alone
    assert isinstance(results[1], CallbackError)
    with pytest.raises(CallbackError, match=words):
        raise results[1]


def test_a_sequence_can_stand_in_several_rows_to_verify_tokens(model):
    run = Run(model, PROMPT, {"repetition_penalty": 1.5})
    expected = generated(model, PROMPT, {"repetition_penalty": 1.5})
    prefixes = [array("q", expected[: len(PROMPT) + i]) for i in range(5)]
    logits = torch.cat([last_logits(model, prefix) for prefix in prefixes])
    results = sample([SampleRow(run.sampler, prefix) for prefix in prefixes], logits)
    assert [found.token_id for found in results] == expected[len(PROMPT) : len(PROMPT) + 5]


def test_frequency_and_presence_penalty_are_openais(model):
    logits = torch.randn(1, model.config.vocab_size, generator=torch.Generator().manual_seed(3)) * 0.2
    run = Run(model, PROMPT, {}, frequency_penalty=0.3, presence_penalty=-0.2)
    for _ in range(40):
        expected = logits[0].clone()
        new = run.tokens[len(PROMPT) :].tolist()
        for token_id in set(new):
            expected[token_id] += -new.count(token_id) * 0.3 + 0.2
        (found,) = sample([run.row], logits)
        assert found.token_id == int(expected.argmax())
        run.tokens.append(found.token_id)
    assert len(set(run.tokens[len(PROMPT) :])) > 5


def test_penalties_and_biases_come_before_the_temperature(model):
    logits = torch.zeros(1, model.config.vocab_size)
    run = Run(model, PROMPT, {**SAMPLE, "temperature": 0.5}, logit_bias={4: 2.0, 5: -torch.inf}, presence_penalty=1.0)
    scores = logits
    for processor in run.sampler.processors.all:
        scores = processor(torch.tensor([[*PROMPT, 9]]), scores)
    assert scores[0, 4:6].tolist() == [4.0, -torch.inf]
    assert (scores[0, 9], scores[0, 60]) == (-2.0, 0.0)


def test_a_bias_bans_and_forces_tokens(model):
    logits = last_logits(model, PROMPT)
    best, second = logits[0].topk(2).indices.tolist()
    assert sample([Run(model, PROMPT, {}, logit_bias={best: -torch.inf}).row], logits) == [Sampled(second)]
    assert sample([Run(model, PROMPT, {}, logit_bias={77: 1000}).row], logits) == [Sampled(77)]


@pytest.mark.parametrize("case", [{}, SAMPLE, {"repetition_penalty": 1.9}], ids=str)
def test_logprobs_are_those_of_the_models_own_logits(model, case):
    run = Run(model, PROMPT, case, logprobs=3)
    other = Run(model, PROMPT, case)
    for _ in range(8):
        logits = last_logits(model, run.tokens)
        with_logprobs, without = sample([run.row, other.row], logits.repeat(2, 1))
        assert with_logprobs.token_id == without.token_id
        assert without.logprobs is None
        expected = torch.log_softmax(logits[0], dim=-1)
        found = with_logprobs.logprobs
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-6)
        assert found.rank == 1 + int((expected > expected[found.token_id]).sum())
        best = expected.topk(3)
        assert [top.token_id for top in found.top] == best.indices.tolist()
        assert [top.logprob for top in found.top] == pytest.approx(best.values.tolist(), abs=1e-6)
        assert [top.rank for top in found.top] == [1, 2, 3]
        run.take(with_logprobs)
        other.take(without)


def test_no_alternatives_or_more_than_there_are_tokens(model):
    logits = last_logits(model, PROMPT).repeat(2, 1)
    none, all_of_them = sample(
        [Run(model, PROMPT, {}, logprobs=0).row, Run(model, PROMPT, {}, logprobs=10**6).row], logits
    )
    assert none.logprobs.top == ()
    assert none.logprobs.rank == 1
    assert len(all_of_them.logprobs.top) == model.config.vocab_size


def test_best_of_needs_logprobs_of_the_tokens(model):
    run = Run(model, PROMPT, SAMPLE, best_of=3)
    assert (run.params.n, run.params.num_sequences, run.params.logprobs) == (1, 3, None)
    (found,) = sample([run.row], last_logits(model, PROMPT))
    assert found.logprobs.token_id == found.token_id


def test_logprobs_of_a_prompt_are_of_the_tokens_that_follow(model):
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    found = prompt_logprobs(logits[:-1], PROMPT[1:], 2)
    expected = torch.log_softmax(logits, dim=-1)
    assert [entry.token_id for entry in found] == PROMPT[1:]
    for place, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(expected[place, PROMPT[place + 1]]), abs=1e-6)
        assert [top.token_id for top in entry.top] == expected[place].topk(2).indices.tolist()


def test_an_own_processor_gets_the_tokens_of_its_own_sequence(model):
    seen = []

    class Looks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
            return scores

    runs = [Run(model, PROMPT, {}), Run(model, PROMPT[:3], {}, logits_processor=[Looks(), Shift()])]
    sample([run.row for run in runs], torch.randn(2, model.config.vocab_size))
    assert seen == [([PROMPT[:3]], (1, model.config.vocab_size), torch.float32)]
    runs[1].tokens.append(5)  # what it was given does not keep the array from growing
