"""Swap space under real models: the same tokens as with transformers' own cache, whatever was evicted in between."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from family_models import build
from sharing import assert_generates_the_same, generate, own, padded, random_tokens

from hfpaged import ContinuousBatcher, InvalidConfigError, PagedCache, cache_pool, unpatch
from hfpaged.engine import events as ev
from hfpaged.engine.admitter import Admitter
from hfpaged.ranks import Ranks
from hfpaged.restore_costs import RestoreCosts
from hfpaged.restoring import Restoring

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [random_tokens(30 + 7 * number, number) for number in range(4)]
# Blocks of 4 tokens that hold one prompt with its answer in each layer group, and little more.
NUM_BLOCKS = {"llama": 18, "mistral": 18, "gpt_oss": 36}


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    """Whether it does is a matter of time, which is another machine's on each day."""
    monkeypatch.setattr(RestoreCosts, "pays", lambda self, *amounts: (self.seconds_per_token or 1) > 1e-8)


@pytest.fixture(params=sorted(NUM_BLOCKS))
def model(request):
    yield tiny_models.shared(request.param)
    unpatch(tiny_models.shared(request.param))


def pool_of(model, **options):
    blocks = NUM_BLOCKS[model.config.model_type]
    return PagedCache(model, **({"block_size": 4, "num_blocks": blocks, "swap_space": "1MiB"} | options)).pool


def tokens_and_logits(model, pool, prompt):
    output = generate(model, PagedCache(model, pool=pool), [prompt])
    return output.sequences.tolist(), output.logits  # and not the cache, which would hold its blocks


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_generate_finds_again_what_was_evicted(model, debug):
    pool = pool_of(model, debug=debug)
    for _ in range(2):
        for prompt in PROMPTS:
            assert_generates_the_same(model, PagedCache(model, pool=pool), [prompt])
    cache = PagedCache(model, pool=pool)
    assert_generates_the_same(model, cache, [PROMPTS[0] + [7, 8]])
    assert cache.explain_last()[0].hit_tokens >= 28
    assert pool.stats().restored_tokens > 0
    pool.check_integrity()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8_e4m3"])
def test_codes_and_scales_come_back_as_they_were(kv_dtype):
    model = tiny_models.shared("llama")
    roomy = pool_of(model, kv_dtype=kv_dtype, num_blocks=400, block_size=8, swap_space=0)
    pressed = pool_of(model, kv_dtype=kv_dtype, num_blocks=9, block_size=8)
    for prompt in [random_tokens(8 * number + 1, number) for number in (4, 5, 6)] * 2:  # the last one is computed anew
        (wanted, logits), (found, own_logits) = (tokens_and_logits(model, each, prompt) for each in (roomy, pressed))
        assert found == wanted
        for left, right in zip(own_logits, logits, strict=True):
            torch.testing.assert_close(left, right)  # not only about the same: it is the same codes
        pressed.check_integrity()
    assert roomy.stats().restored_tokens == 0 < pressed.stats().restored_tokens
    unpatch(model)


def test_a_batch_of_rows_and_a_fork_begin_with_what_came_back(model):
    import copy

    pool = pool_of(model, num_blocks=3 * NUM_BLOCKS[model.config.model_type])
    batch = padded(PROMPTS[0], PROMPTS[1] + [5])
    for rows in (batch, padded(*PROMPTS[2:]), padded(random_tokens(50, 8), random_tokens(50, 9)), batch):
        assert_generates_the_same(model, PagedCache(model, pool=pool), rows)
    cache = PagedCache(model, pool=pool)
    generate(model, cache, [PROMPTS[3]])
    fork = copy.deepcopy(cache)
    if model.config.model_type == "llama":
        cache.crop(-5)
    del cache
    pool.check_integrity()
    assert fork.get_seq_length() == len(PROMPTS[3]) + 5
    assert pool.stats().restored_tokens > 0


def test_pieces_of_a_prompt_of_other_salts_do_not_come_back():
    model = tiny_models.shared("llama")
    pool = pool_of(model)
    for salt in ("a", "b"):
        for prompt in PROMPTS[:3]:
            assert_generates_the_same(model, PagedCache(model, pool=pool, salt=salt), [prompt])
    assert pool.stats().restored_tokens == 0
    assert_generates_the_same(model, PagedCache(model, pool=pool, salt="a"), [PROMPTS[0]])
    assert pool.stats().restored_tokens > 0
    unpatch(model)


def test_explanations_tell_what_lies_in_host_memory():
    model = tiny_models.shared("llama")
    pool = pool_of(model)
    for prompt in PROMPTS[:3]:
        generate(model, PagedCache(model, pool=pool), [prompt])
    report = pool.explain(PROMPTS[0])
    assert (report.reason, report.known_tokens, report.lost_tokens, report.host_tokens) == ("evicted", 0, 28, 28)
    assert "28 more were known until a block was evicted" in str(report)
    assert "they are in host memory, and come back" in str(report)
    for _ in range(9):
        pool.swapping.costs.told_prompt(100, 1e-7)
    cache = PagedCache(model, pool=pool)
    generate(model, cache, [PROMPTS[0]])
    assert cache.explain_last()[0].host_tokens > 0
    assert pool.swapping.counts.declined == 1
    unpatch(model)


def test_a_batcher_brings_back_prompts_and_preempted_requests(model, monkeypatch):
    came_back, begin = [], Admitter.begin

    def watched(self, seq, match=None):
        found = begin(self, seq, match)
        if seq.request.preemptions and match is not None:
            came_back.append(found.length(4) - match.length(4))
        return found

    monkeypatch.setattr(Admitter, "begin", watched)
    blocks = {"llama": 36, "mistral": 24, "gpt_oss": 56}[model.config.model_type]
    settings = {"max_new_tokens": 16, "do_sample": False}
    wanted = [generate(model, own(model), [p], new=16).sequences[0, len(p) :].tolist() for p in PROMPTS]
    preempted = []

    def see(event):
        if type(event) is ev.Preempted:
            preempted.append(event.request_id)

    sizes = {"block_size": 4, "num_blocks": blocks, "swap_space": "1MiB", "watermark": 0.0, "max_num_seqs": 8}
    with ContinuousBatcher(model, **sizes, prepack=False, hooks=(see,)) as batcher:
        for _ in range(3):
            outputs = batcher.generate(PROMPTS, **settings)
            assert [output.token_ids for output in outputs] == wanted
            batcher.pool.check_integrity()
        stats = batcher.pool.stats()
        assert stats.swapped_in > 0
        assert stats.restored_tokens > 0
        assert all(output.num_cached_tokens for output in outputs)
        if model.config.model_type == "llama":  # the others need fewer blocks than are there
            assert preempted
            assert max(came_back) > 0
        assert batcher.pool.swapping.costs.bytes_per_second("host") > 0
        assert batcher.describe()["swap_bytes"] == 2**20


def test_all_rows_begin_with_what_came_back_for_the_first_of_them():
    model, common = tiny_models.shared("llama"), random_tokens(40, 1)
    pool = pool_of(model, num_blocks=40)
    for prompt in (common, *(random_tokens(80, seed) for seed in range(5, 9))):
        generate(model, PagedCache(model, pool=pool), [prompt])
    cache = PagedCache(model, pool=pool)
    generate(model, cache, padded(*(common + random_tokens(6, seed) for seed in (10, 11, 12))))
    assert [report.hit_tokens for report in cache.explain_last()] == [40, 40, 40]
    assert pool.stats().restored_tokens == 40  # and each block once
    unpatch(model)


def test_ctrl_c_while_blocks_come_back_leaves_none_behind(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    model = tiny_models.shared("llama")
    pool = pool_of(model)
    for prompt in PROMPTS[:2]:
        generate(model, PagedCache(model, pool=pool), [prompt])
    monkeypatch.setattr(Restoring, "bring", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, PagedCache(model, pool=pool), [PROMPTS[1][:20] + PROMPTS[2][:10]])
    monkeypatch.undo()
    assert pool.num_free == pool.num_blocks
    pool.check_integrity()
    assert_generates_the_same(model, PagedCache(model, pool=pool), [PROMPTS[0]])
    unpatch(model)


def test_a_rank_has_no_tiers_that_came_with_a_pool(monkeypatch):
    model = tiny_models.shared("llama")
    with_tier, plain = pool_of(model), pool_of(model, swap_space=0)
    monkeypatch.setattr(cache_pool, "ranks_of", lambda model: Ranks(1, 2, None))
    with pytest.raises(InvalidConfigError, match=r"rank 1 of 2 of a model: each would decide"):
        PagedCache(model, pool=with_tier)
    plain.ranks = Ranks(1, 2, None)
    with pytest.raises(InvalidConfigError, match="a pool of rank 1 of 2 has no tiers"):
        plain.add_tier(None)
    unpatch(model)


def test_refusals_say_why(monkeypatch):
    model = tiny_models.shared("llama")
    with pytest.raises(InvalidConfigError, match="prefix_sharing=False none is known"):
        ContinuousBatcher(model, num_blocks=20, swap_space="1MiB", prefix_sharing=False)
    with pytest.raises(InvalidConfigError, match="prefix_sharing=False none is known"):
        PagedCache(model, num_blocks=20, swap_space="1MiB", prefix_sharing=False)
    with pytest.raises(InvalidConfigError, match="names no directory"):
        PagedCache(model, num_blocks=20, prefix_store="")
    with pytest.raises(InvalidConfigError, match="comes too late"):
        PagedCache(model, pool=pool_of(model), swap_space="1MiB")
    with pytest.raises(InvalidConfigError, match="of host memory"):
        PagedCache(model, num_blocks=20, swap_space="900TiB")
    with pytest.raises(InvalidConfigError, match="hold no block"):
        generate(model, PagedCache(model, num_blocks=20, swap_space=8), [PROMPTS[0]])
    monkeypatch.setattr(cache_pool, "ranks_of", lambda model: Ranks(0, 2, None))
    with pytest.raises(InvalidConfigError, match="several processes compute this model"):
        PagedCache(model, num_blocks=20, swap_space="1MiB")
    unpatch(model)


def test_a_model_whose_state_lies_in_no_block_is_refused():
    with pytest.raises(InvalidConfigError, match=r"swap_space='1MiB'.*a state besides keys and values"):
        ContinuousBatcher(build("jamba"), num_blocks=20, swap_space="1MiB")


def test_a_swap_space_without_a_unit_is_refused_as_what_it_is():
    with pytest.raises(InvalidConfigError, match=r"^swap_space=4 bytes hold no block: one takes \d+; give more, such"):
        ContinuousBatcher(tiny_models.shared("llama"), None, memory="1MiB", swap_space=4)


def test_a_prompt_of_which_all_came_back_is_not_said_to_have_been_evicted():
    """Its last block lies below still: only a part of it could be used, as the last token is computed in any case."""
    ended = {}
    for swap_space in (0, "1MiB"):
        batcher = ContinuousBatcher(
            tiny_models.shared("llama"), num_blocks=24, block_size=4, prepack=False, swap_space=swap_space
        )
        events = []
        batcher.hooks.append(events.append)
        with batcher:
            for start in (3, 15, 27, 39, 51, 3):
                batcher.generate([list(range(start, start + 40))], max_new_tokens=4, do_sample=False)
        ended[swap_space] = [event.reason for event in events if isinstance(event, ev.PrefixMatched)][-1]
    assert ended == {0: "evicted", "1MiB": "complete"}
