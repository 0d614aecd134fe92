"""A batcher over two ranks, in every way in which it can be asked; what each case gives is compared by the tests."""

import os
import sys

import torch
import two_ranks

import hfpaged
from hfpaged import ContinuousBatcher, NotLeaderError, tensor_parallel
from hfpaged.engine import sizing
from hfpaged.errors import InvalidConfigError, PrefixFileError

torch.set_num_threads(1)
MODEL, WINDOWED = (tensor_parallel.load_model(folder).eval() for folder in sys.argv[1:3])
SIZES = {"num_blocks": 200, "max_num_seqs": 9, "max_num_batched_tokens": 64, "prepack": False}


def prompts(*lengths):
    return [[3 + (7 * row + 5 * i) % 90 for i in range(length)] for row, length in enumerate(lengths)]


def tokens_of(outputs):
    errors = [str(output.error) for output in outputs if output.error is not None]
    return errors or [sequence.token_ids for output in outputs for sequence in output.sequences]


class Asked:
    """Prompts twice: the second time their prefixes are known. What came of them, and how the pool is left."""

    def __init__(self, *lengths, sizes=None, model=MODEL, **asked):
        self.lengths, self.model, self.sizes = lengths, model, SIZES | (sizes or {})
        self.asked = {"max_new_tokens": 12, "ignore_eos": True} | asked

    def __call__(self):
        with ContinuousBatcher(self.model, **self.sizes) as batcher:
            first = batcher.generate(prompts(*self.lengths), **self.asked)
            second = batcher.generate(prompts(*self.lengths), **self.asked)
            batcher.pool.check_integrity()
            told = batcher.describe()
            return {
                "first": tokens_of(first),
                "second": tokens_of(second),
                "found": [output.num_cached_tokens for output in second],
                "preemptions": sum(output.metrics.preemptions for output in first),
                "accepted": sum(output.metrics.accepted_tokens for output in first),
                "bytes": batcher.pool.storage.nbytes,
                "forward": told["forward"],
                "ranks": told["ranks"],
                "free": batcher.pool.num_free == batcher.pool.num_blocks,
            }


def one_by_one():
    """Attention that reads dense keys refuses several sequences side by side: all ranks notice."""
    with ContinuousBatcher(MODEL, **SIZES) as batcher:
        MODEL.set_attn_implementation("eager")
        try:
            outputs = batcher.generate(prompts(4, 21, 13), max_new_tokens=8, ignore_eos=True)
        finally:
            MODEL.set_attn_implementation("hfpaged")
        return [batcher.describe()["forward"], tokens_of(outputs)]


def aborted():
    """Rank 0 alone has the requests; the others follow whatever it does."""
    with ContinuousBatcher(MODEL, **SIZES) as batcher:
        if not batcher.is_leader:
            batcher.follow()
            return batcher.is_closed
        kept, gone = (batcher.add_request(p, max_new_tokens=20, ignore_eos=True) for p in prompts(9, 30))
        outputs = {}
        while batcher.has_work:
            for output in batcher.step():
                outputs[output.request_id] = output
            if batcher.pool.stats().tokens > 42:
                batcher.abort(gone)
        batcher.pool.check_integrity()
        reasons = [outputs[request].finish_reason for request in (kept, gone)]
        return [reasons, outputs[kept].token_ids, batcher.pool.num_free == batcher.pool.num_blocks]


def streamed():
    with ContinuousBatcher(MODEL, **SIZES) as batcher:
        batcher.warm_up()
        if batcher.is_leader:
            return [token for event in batcher.stream(prompts(9)[0], max_new_tokens=9) for token in event.token_ids]
        return None


def refused():
    """What is raised on rank 0 is raised on all; what only rank 0 can do says so."""
    said = []
    with ContinuousBatcher(MODEL, **SIZES) as batcher:
        for settings in ({"max_new_tokens": 10**6}, {"max_new_tokens": -1}):
            try:
                batcher.generate(prompts(5), **settings)
            except hfpaged.HfpagedError as error:
                said.append(type(error).__name__)
        if not batcher.is_leader:
            try:
                batcher.add_request([1, 2, 3])
            except NotLeaderError as error:
                said.append(str(error))
        for act in (batcher.pool.save_prefixes, batcher.pool.load_prefixes):
            try:
                act("nowhere")
            except PrefixFileError as error:
                said.append(str(error))
        try:
            hfpaged.PagedCache(MODEL, pool=batcher.pool)
        except InvalidConfigError as error:
            said.append(str(error))
    return said


def refused_sizes():
    said = []
    told = ({"cuda_graphs": True}, {"shadow": 0.5, "kv_dtype": "int8"}, {"prepack": True}, {"swap_space": "1MiB"})
    for sizes in told:
        try:
            ContinuousBatcher(MODEL, **SIZES | sizes)
        except InvalidConfigError as error:
            said.append(str(error))
    return said


def unlike():
    """What decides about forwards and blocks is the same on all ranks, or none of them has a batcher."""
    said = []
    for own in ({"kv_dtype": "int8"}, {"block_size": 32}, {"max_num_batched_tokens": 32}, {"num_blocks": None}):
        try:
            ContinuousBatcher(MODEL, **SIZES | (own if os.environ.get("RANK") == "1" else {}))
        except hfpaged.RanksDifferError as error:
            said.append(str(error))
    return said


def no_room():
    """On one rank alone there is no memory for a pool: that is told on all."""
    before = sizing.device_memory
    sizing.device_memory = (lambda device: (10, 1000)) if os.environ.get("RANK") == "1" else before
    try:
        ContinuousBatcher(MODEL, max_num_seqs=4, max_num_batched_tokens=32)
    except InvalidConfigError as error:
        return str(error)
    finally:
        sizing.device_memory = before


def sized_by_memory():
    with ContinuousBatcher(MODEL, max_num_seqs=4, max_num_batched_tokens=32, memory=0.9) as batcher:
        return [batcher.pool.num_blocks, batcher.describe()["sizing"], batcher.generate([[5, 6]])[0].finish_reason]


CASES = {
    "greedy": Asked(4, 21, 1, 40),
    "sampled": Asked(4, 21, 40, do_sample=True, seed=7, n=2),
    "beams": Asked(7, 21, num_beams=3, n=2, sizes={"block_size": 4}),
    "in chunks": Asked(40, 70, sizes={"max_num_batched_tokens": 9}),
    "preempted": Asked(4, 21, 13, 40, sizes={"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32}),
    "int8": Asked(4, 21, 40, sizes={"kv_dtype": "int8"}),
    "int4": Asked(4, 21, 40, sizes={"kv_dtype": "int4"}),
    "prompt lookup": Asked(40, 40, prompt_lookup_num_tokens=3, max_new_tokens=60),
    "windows": Asked(4, 21, 40, model=WINDOWED, sizes={"block_size": 4}),
    "one by one": one_by_one,
    "aborted": aborted,
    "streamed": streamed,
    "refused": refused,
    "refused sizes": refused_sizes,
    "unlike": unlike,
    "no room": no_room,
    "sized by memory": sized_by_memory,
}

if __name__ == "__main__":
    two_ranks.report(CASES)
