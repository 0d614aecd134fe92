"""Beam search without a model run, against generate(): the loop below stands in for the engine."""

from __future__ import annotations

import copy
import threading
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import quality_model
import tiny_models
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, TemperatureLogitsWarper
from transformers.generation import MaxLengthCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import GenerationMixin

from hfpaged.compat import cache_argument
from hfpaged.engine.beam_search import BeamSearch, BeamSettings
from hfpaged.errors import InvalidConfigError, InvalidLogitsError

PROMPT = [5, 17, 99, 3, 42, 17, 99, 60]
NEW = 12


class Judged(NamedTuple):
    """What generate() gave, and what it was about to search with."""

    hypotheses: list[tuple[list[int], float]]
    settings: BeamSettings
    processors: LogitsProcessorList
    stopping: list[StoppingCriteria]


def judge(model, prompt=PROMPT, seed=7, **arguments) -> Judged:
    """generate() with `arguments`, spied on where it begins to search."""
    seen = {}
    search = GenerationMixin._beam_search

    def spy(self, input_ids, logits_processor, stopping_criteria, generation_config, **rest):
        seen.update(copy.deepcopy({"processors": logits_processor, "stopping": stopping_criteria}))
        seen["config"] = generation_config
        return search(self, input_ids, logits_processor, stopping_criteria, generation_config, **rest)

    torch.manual_seed(seed)
    with patch.object(GenerationMixin, "_beam_search", spy):
        given = model.generate(
            torch.tensor([prompt]), return_dict_in_generate=True, output_scores=True, pad_token_id=0, **arguments
        )
    config = seen["config"]
    eos = config._eos_token_tensor
    settings = BeamSettings(
        num_beams=config.num_beams,
        max_new_tokens=config.max_length - len(prompt),
        eos_token_ids=() if eos is None else tuple(eos.tolist()),
        do_sample=config.do_sample,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        seed=seed,
    )
    lengths = (given.beam_indices >= 0).sum(dim=-1).tolist()
    tokens = [row[len(prompt) :][:length] for row, length in zip(given.sequences.tolist(), lengths, strict=True)]
    own = (MaxLengthCriteria, EosTokenCriteria)
    stopping = [criterion for criterion in seen["stopping"] if not isinstance(criterion, own)]
    hypotheses = list(zip(tokens, given.sequences_scores.tolist(), strict=True))
    return Judged(hypotheses, settings, seen["processors"], stopping)


class Loop:
    """One request in an engine that has nothing else: its cache follows the beams."""

    def __init__(self, model, search, prompt=PROMPT):
        self.model, self.search, self.cache = model, search, DynamicCache(config=model.config)
        self.beams = [list(prompt)]
        self.logits = self.forward(torch.tensor([prompt]))

    def forward(self, ids):
        return self.model(ids, **{cache_argument(): self.cache}).logits[:, -1]

    @torch.no_grad()
    def step(self):
        assert [beam.tolist() for beam in self.search.beams] == self.beams
        parents, tokens = self.search.advance(self.logits)
        self.beams = [[*self.beams[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        if not self.search.is_done:
            self.cache.reorder_cache(torch.tensor(parents))
            self.logits = self.forward(torch.tensor(tokens)[:, None])

    def run(self):
        while not self.search.is_done:
            self.step()
        return self.search


def search_of(model, judged: Judged, prompt=PROMPT) -> BeamSearch:
    return BeamSearch(model, judged.settings, prompt, judged.processors, judged.stopping)


def assert_same(results, judged: Judged) -> None:
    assert [each.token_ids for each in results] == [tokens for tokens, _ in judged.hypotheses]
    scores = torch.tensor([[each.score for each in results], [score for _, score in judged.hypotheses]])
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)


class StopsAfter(StoppingCriteria):
    """A sequence ends behind any of these tokens."""

    def __init__(self, *tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


class Halves(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.mul_(1 + (input_ids.sum(dim=-1, keepdim=True) % 3))  # in place, and by the history


MANY = list(range(2, 60, 4))  # of 101 tokens: sequences end early and often
# What to ask generate() for; num_beams=3 and max_new_tokens=NEW where nothing is said.
TABLE: dict[str, dict[str, Any]] = {
    "two beams": {"num_beams": 2},
    "all five returned": {"num_beams": 5, "num_return_sequences": 5},
    "one token": {"max_new_tokens": 1, "num_return_sequences": 3},
    "one token that may end": {"max_new_tokens": 1, "num_return_sequences": 3, "eos_token_id": MANY},
    "many beams": {"num_beams": 20, "num_return_sequences": 20, "eos_token_id": MANY},
    "one eos": {"eos_token_id": 30, "num_return_sequences": 3},
    "eos list": {"eos_token_id": MANY, "num_return_sequences": 3},
    "eos list, early stopping": {"eos_token_id": MANY, "early_stopping": True, "num_return_sequences": 3},
    "eos list, never": {"eos_token_id": MANY, "early_stopping": "never", "num_return_sequences": 3},
    "eos list, never, short wanted": {"eos_token_id": MANY, "early_stopping": "never", "length_penalty": -1.5},
    "long wanted": {"eos_token_id": MANY, "length_penalty": 3.0, "num_return_sequences": 3},
    "long wanted, never": {"eos_token_id": MANY, "length_penalty": 3.0, "early_stopping": "never"},
    "long wanted, early": {"eos_token_id": MANY, "length_penalty": 3.0, "early_stopping": True},
    "short wanted": {"eos_token_id": MANY, "length_penalty": -1.5, "num_return_sequences": 2},
    "no length penalty": {"eos_token_id": MANY, "length_penalty": 0.0, "num_return_sequences": 3},
    "min_new_tokens": {"eos_token_id": MANY, "min_new_tokens": 6, "num_return_sequences": 3},
    "repetition": {"repetition_penalty": 1.6, "num_return_sequences": 3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2, "eos_token_id": MANY},
    "bad words": {"bad_words_ids": [[7], [11, 13]], "eos_token_id": MANY},
    "sequence bias": {"sequence_bias": [[[20], 4.0], [[3, 4], -9.0]], "eos_token_id": MANY},
    "suppressed": {"suppress_tokens": list(range(40)), "begin_suppress_tokens": [70, 71]},
    "forced eos": {"forced_eos_token_id": 30, "eos_token_id": 30, "num_return_sequences": 3},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 30, "num_return_sequences": 3},
    "renormalized": {"repetition_penalty": 1.6, "renormalize_logits": True},
    "few allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] + 1) % 101, 30], "eos_token_id": 30},
    "one allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] + 1) % 101], "num_return_sequences": 3},
    "own processor": {"logits_processor": LogitsProcessorList([Halves()]), "eos_token_id": MANY},
    "own criterion": {"stopping_criteria": [StopsAfter(*range(0, 100, 5))], "num_return_sequences": 3},
    "own criterion and eos": {"stopping_criteria": [StopsAfter(*range(0, 100, 5))], "eos_token_id": MANY},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "sampled, eos list": {"do_sample": True, "eos_token_id": MANY, "num_return_sequences": 3},
    "sampled, hot": {"do_sample": True, "temperature": 3.0, "eos_token_id": MANY, "num_return_sequences": 3},
    "sampled, top_k": {"do_sample": True, "top_k": 12, "temperature": 2.0, "num_beams": 4, "eos_token_id": 30},
    "sampled, top_p": {"do_sample": True, "top_p": 0.7, "temperature": 4.0, "eos_token_id": 30},
    "sampled, min_p": {"do_sample": True, "min_p": 0.01, "temperature": 4.0, "early_stopping": True},
}


@pytest.mark.parametrize("name", TABLE)
def test_a_search_finds_what_generate_finds(name):
    model = tiny_models.shared("llama")
    judged = judge(model, **({"num_beams": 3, "max_new_tokens": NEW} | TABLE[name]))
    search = Loop(model, search_of(model, judged)).run()
    assert_same(search.results(len(judged.hypotheses)), judged)


@pytest.mark.parametrize("prompt", [[9], [60, 60, 60, 60], list(range(1, 90, 3))], ids=len)
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_other_models_and_prompts_give_the_same(name, prompt):
    model = tiny_models.shared(name)
    for settings in (TABLE["eos list"], TABLE["sampled, hot"]):
        judged = judge(model, prompt, num_beams=3, max_new_tokens=NEW, **settings)
        search = Loop(model, search_of(model, judged, prompt), prompt).run()
        assert_same(search.results(3), judged)


@pytest.mark.parametrize("strings", [["a"], ["e", " t", "\n"], [chr(n) for n in range(40, 110, 2)]], ids=len)
@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings_end_a_sequence_where_generate_ends_it(strings, do_sample):
    model, tokenizer = quality_model.small_llama(), quality_model.byte_tokenizer()
    judged = judge(
        model, num_beams=4, max_new_tokens=NEW, num_return_sequences=4, temperature=3.0 if do_sample else None,
        do_sample=do_sample, stop_strings=strings, tokenizer=tokenizer, length_penalty=0.0,
    )  # fmt: skip
    assert judged.stopping
    results = Loop(model, search_of(model, judged)).run().results(4)
    assert_same(results, judged)
    for each in results:
        text = tokenizer.decode(each.token_ids)
        assert each.finish_reason == ("stop" if any(string in text for string in strings) else "length")
    if len(strings) > 3:
        assert "stop" in [each.finish_reason for each in results]


def test_a_sequence_that_ends_with_its_last_token_was_stopped_and_not_cut():
    model = tiny_models.shared("llama")
    reasons = []
    for new in range(2, 8):
        judged = judge(model, num_beams=4, max_new_tokens=new, num_return_sequences=4, eos_token_id=MANY)
        results = Loop(model, search_of(model, judged)).run().results(4)
        for tokens, _, reason in results:
            assert reason == ("stop" if tokens[-1] in MANY else "length")
            reasons.append((reason, len(tokens) == new))
    assert set(reasons) == {("stop", True), ("stop", False), ("length", True)}


def test_the_table_has_sequences_that_end_early_and_beams_that_change_places():
    model = tiny_models.shared("llama")
    judged = judge(model, num_beams=3, max_new_tokens=NEW, num_return_sequences=3, eos_token_id=MANY)
    assert len({len(tokens) for tokens, _ in judged.hypotheses}) > 1
    loop = Loop(model, search_of(model, judged))
    moves = []
    advance = loop.search.advance
    with patch.object(loop.search, "advance", lambda logits: moves.append(advance(logits)) or moves[-1]):
        loop.run()
    assert moves[0].parents == [0, 0, 0]
    assert any(move.parents != [0, 1, 2] for move in moves[1:])


HOT = LogitsProcessorList([TemperatureLogitsWarper(5.0)])  # so that draws matter


def sampled(model, prompt=PROMPT, seed=7):
    return BeamSearch(model, BeamSettings(3, NEW, tuple(MANY), do_sample=True, seed=seed), prompt, HOT)


def sampled_tokens(model, seed=7, before_each_step=lambda: None):
    loop = Loop(model, sampled(model, seed=seed))
    while not loop.search.is_done:
        before_each_step()
        loop.step()
    return loop.search.results(3)


def test_the_same_seed_gives_the_same_tokens_whatever_else_draws():
    model = tiny_models.shared("llama")
    alone = sampled_tokens(model)
    assert sampled_tokens(model, 8) != alone
    other = Loop(model, sampled(model, PROMPT[:3]), PROMPT[:3])

    def draw():
        torch.rand(5)
        if not other.search.is_done:
            other.step()

    assert sampled_tokens(model, before_each_step=draw) == alone
    assert other.search.is_done


def test_a_search_leaves_the_global_generator_alone():
    model = tiny_models.shared("llama")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sampled_tokens(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_another_thread_change_nothing_and_are_not_changed():
    model = tiny_models.shared("llama")
    alone = sampled_tokens(model)
    weights, done, drawn = torch.ones(50), threading.Event(), []

    def draw():
        torch.manual_seed(1)
        while not done.is_set():
            drawn.append(torch.multinomial(weights, 1).item())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert [sampled_tokens(model) for _ in range(2)] == [alone] * 2
    finally:
        done.set()
        thread.join()
    torch.manual_seed(1)
    assert drawn == [torch.multinomial(weights, 1).item() for _ in drawn]
    assert len(drawn) > 100


def test_without_a_seed_a_fresh_one_is_drawn_that_gives_the_same_again():
    model = tiny_models.shared("llama")
    first, second = (sampled(model, seed=None) for _ in range(2))
    assert first.seed != second.seed
    assert Loop(model, first).run().results(3) == sampled_tokens(model, first.seed)


def test_logits_of_any_float_type_are_taken_and_left_as_they_are():
    model = tiny_models.shared("llama")
    logits = torch.randn(1, tiny_models.VOCAB).bfloat16()
    kept = logits.clone()
    moves = [
        BeamSearch(model, BeamSettings(3, 4), PROMPT, LogitsProcessorList([Halves()])).advance(each)
        for each in (logits, logits.float())
    ]
    assert moves[0] == moves[1]
    assert torch.equal(logits, kept)


def test_the_results_so_far_are_those_that_ended():
    model = tiny_models.shared("llama")
    search = BeamSearch(model, BeamSettings(3, NEW, (7,)), PROMPT)
    assert search.results(3) == []
    logits = torch.zeros(1, tiny_models.VOCAB)
    logits[0, 7] = 5.0
    search.advance(logits)
    assert not search.is_done
    (ended,) = search.results(3)
    assert (ended.token_ids, ended.finish_reason) == ([7], "stop")
    assert all(beam.tolist()[:-1] == PROMPT and beam[-1] != 7 for beam in search.beams)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused_and_the_search_can_go_on(wrong, do_sample):
    model = tiny_models.shared("llama")
    settings = BeamSettings(3, NEW, tuple(MANY), do_sample=do_sample, seed=7)
    expected = Loop(model, BeamSearch(model, settings, PROMPT)).run().results(3)
    loop = Loop(model, BeamSearch(model, settings, PROMPT))
    loop.step()
    bad = loop.logits.clone()
    bad[1, 3] = wrong
    with pytest.raises(InvalidLogitsError, match=r"^1 of 3 rows of logits hold NaN"):
        loop.search.advance(bad)
    assert loop.run().results(3) == expected


class Fails(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("mine")
        return scores


def test_what_a_processor_raises_goes_through():
    model = tiny_models.shared("llama")
    loop = Loop(model, BeamSearch(model, BeamSettings(3, NEW), PROMPT, LogitsProcessorList([Fails()])))
    with pytest.raises(ZeroDivisionError, match="mine"):
        loop.run()
    assert loop.run().results(3) == Loop(model, BeamSearch(model, BeamSettings(3, NEW), PROMPT)).run().results(3)


@pytest.mark.parametrize(("beams", "new"), [(0, 5), (3, 0), (-1, 5)])
def test_sizes_that_cannot_be_are_refused(beams, new):
    with pytest.raises(InvalidConfigError, match=f"num_beams={beams} with max_new_tokens={new}"):
        BeamSettings(beams, new)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidConfigError, match="prompt_ids has 0 token ids"):
        BeamSearch(tiny_models.shared("llama"), BeamSettings(2, 5), [])


@pytest.mark.parametrize("n", [0, 4])
def test_more_results_than_beams_are_refused(n):
    search = BeamSearch(tiny_models.shared("llama"), BeamSettings(3, 5), PROMPT)
    with pytest.raises(InvalidConfigError, match=f"{n} sequences of a search with num_beams=3"):
        search.results(n)


def test_a_vocabulary_with_fewer_continuations_than_are_looked_at_is_refused():
    search = BeamSearch(tiny_models.shared("llama"), BeamSettings(2, 5, eos_token_ids=tuple(range(4))), PROMPT)
    with pytest.raises(InvalidConfigError, match=r"num_beams=2 looks at 10 continuations a step, .* of 4 has 8"):
        search.advance(torch.zeros(1, 4))
