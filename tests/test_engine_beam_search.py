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
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import MaxLengthCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import GenerationMixin

from hfpaged.compat import cache_argument
from hfpaged.engine.beam_search import BeamSearch, BeamSettings
from hfpaged.errors import InvalidConfigError, InvalidLogitsError

PROMPT = [5, 17, 99, 3, 42, 17, 99, 60]
NEW = 14


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
