"""Arguments of generate() that change which tokens come, each with the name of what it is about."""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

SAMPLE = {"do_sample": True, "top_k": 0}
ALL_WARPERS = {
    "do_sample": True,
    "top_k": 40,
    "temperature": 1.8,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.95,
    "epsilon_cutoff": 1e-4,
    "eta_cutoff": 1e-4,
    "renormalize_logits": True,
}
SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15, 92], skip_first_ngram_calls=True)


class Shift(LogitsProcessor):
    """A user's own: another token is liked at each length. It writes into its argument, as users do."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1] % scores.shape[1]] += 9.0
        scores[:, input_ids[0, -1]] -= 2.0
        return scores


class EvenLength(StoppingCriteria):
    """A user's own: stops at the first even token behind 20 tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] > 20 and int(input_ids[0, -1]) % 2 == 0])


def allowed(batch_id, ids):
    assert batch_id == 0
    return [int(ids[-1]) * 7 % 400, int(ids[0]), 11 + len(ids)]


GREEDY_CASES = {
    "greedy": {},
    "default length": {"max_new_tokens": None},
    "max_length": {"max_new_tokens": None, "max_length": 27},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "repetition_penalty": 0.5},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2, "repetition_penalty": 0.5},
    "bad_words": {"bad_words_ids": [[i] for i in range(0, 300, 3)] + [[5, 7]]},
    "sequence_bias": {"sequence_bias": [[[17], 6.0], [[17, 17], -20.0], [[17, 20, 21], 9.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(3, 300, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 402, 2))},
    "forced_eos": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "forced_eos list": {"forced_eos_token_id": [9, 10]},
    "forced_bos": {"forced_bos_token_id": 12},
    "eos": {"eos_token_id": 207},
    "eos list": {"eos_token_id": [*range(20, 30), 191, 9]},
    "min_new_tokens": {"eos_token_id": list(range(3, 200)), "min_new_tokens": 12},
    "min_length": {"eos_token_id": list(range(3, 200)), "min_length": 15},
    "min_new_tokens of no token": {"eos_token_id": [*range(3, 200), 9999], "min_new_tokens": 13},
    "exponential decay": {"eos_token_id": 31, "exponential_decay_length_penalty": (3, 1.4)},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.3},
    "remove_invalid_values": {"remove_invalid_values": True, "suppress_tokens": [3, 4]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "own processor": {"logits_processor": LogitsProcessorList([Shift()])},
    "own criterion": {"stopping_criteria": StoppingCriteriaList([EvenLength()])},
    "own length": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(13)])},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=8.0)},
    "watermark selfhash": {"watermarking_config": WatermarkingConfig(bias=8.0, seeding_scheme="selfhash")},
    "stop string": {"stop_strings": ["ump"]},
    "stop strings": {"stop_strings": ["e?", "xx", "zz"]},
}
SAMPLED_CASES = {
    "sampling": SAMPLE,
    "default top_k": {"do_sample": True},
    "temperature": {**SAMPLE, "temperature": 0.7},
    "hot": {**SAMPLE, "temperature": 2.5},
    "top_k": {"do_sample": True, "top_k": 7},
    "top_p": {**SAMPLE, "top_p": 0.8},
    "min_p": {**SAMPLE, "min_p": 0.05},
    "typical_p": {**SAMPLE, "typical_p": 0.6},
    "top_h": {**SAMPLE, "top_h": 0.5},
    "epsilon_cutoff": {**SAMPLE, "epsilon_cutoff": 0.01},
    "eta_cutoff": {**SAMPLE, "eta_cutoff": 0.02},
    "all of them": ALL_WARPERS,
    "sampling and penalties": {**SAMPLE, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "temperature": 3.0},
    "sampling and eos": {**SAMPLE, "eos_token_id": list(range(50)), "min_new_tokens": 6},
    "sampling and a stop string": {**SAMPLE, "temperature": 2.0, "stop_strings": ["e", "th"]},
    "sampling and own processor": {**SAMPLE, "logits_processor": LogitsProcessorList([Shift()])},
    "own temperature": {
        **SAMPLE,
        "temperature": 0.5,
        "top_p": 0.9,
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(3.0)]),
    },
    "sampling and allowed tokens": {**SAMPLE, "temperature": 4.0, "prefix_allowed_tokens_fn": allowed},
    "synthid": {**SAMPLE, "watermarking_config": SYNTHID},
}
CASES = GREEDY_CASES | SAMPLED_CASES
