"""What tests of a served batcher share: a tiny one, steps that take their time, and the counts that must come out."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager

import tiny_models
import tiny_tokenizers

from hfpaged import ContinuousBatcher
from hfpaged.engine import tally_keys as keys
from hfpaged.engine.events import StepFinished

PATH = "/v1/completions"
PROMPT = list(range(3, 23))
SIZES = {"num_blocks": 600, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8, "prepack": False}


@functools.cache
def tiny_model():
    """The table's models have too few tokens for a tokenizer."""
    return tiny_models.make("llama", vocab_size=420)


def save(folder):
    """That model and a tokenizer, where `hfpaged serve` can load them."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizers.byte_level().save_pretrained(folder)
    return folder


def tiny_batcher(**sizes):
    return ContinuousBatcher(tiny_model(), tiny_tokenizers.byte_level(), **SIZES | sizes)


def body(prompt=None, max_tokens=200, **rest):
    """A request that goes on until it has all its tokens."""
    asked = {"prompt": PROMPT if prompt is None else prompt, "max_tokens": max_tokens, "temperature": 0}
    return {**asked, "ignore_eos": True, **rest}


@contextmanager
def slow_steps(batcher, seconds=0.01):
    """Each step takes so much longer: there is a middle to do things in."""

    def wait(event):
        if isinstance(event, StepFinished):
            time.sleep(seconds)

    batcher.hooks.append(wait)
    try:
        yield
    finally:
        batcher.hooks.remove(wait)


class Counts:
    """Of requests, since it was made."""

    def __init__(self, batcher):
        self._batcher = batcher
        self._before = self._read()

    def _read(self):
        sums, in_flight = self._batcher.tally.read()
        numbers = sums.numbers

        def total(metric):
            return sum(value for key, value in numbers.items() if key[0] == metric)

        return {
            "received": numbers[keys.RECEIVED], "finished": total(keys.FINISHED), "aborted": numbers[keys.ABORTED],
            "rejected": total(keys.REJECTED), "in_flight": len(in_flight),
            "durations": sums.histograms[keys.DURATION].count,
        }  # fmt: skip

    def __getattr__(self, name):
        return self._read()[name] - self._before[name]

    def check(self):
        """received = finished + aborted + rejected + in flight"""
        now = self._read()
        assert now["received"] == now["finished"] + now["aborted"] + now["rejected"] + now["in_flight"], now
        assert now["durations"] == now["finished"] + now["aborted"], now
