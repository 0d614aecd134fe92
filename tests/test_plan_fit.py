"""What fits: the answers that everybody can work out by hand, and what each part of a workload adds."""

from __future__ import annotations

import math

import pytest
from plan_cases import GB, GIB, case, llama

from hfpaged.engine.block_needs import BlockNeeds
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import Workload
from hfpaged.planner.fit import MANY, fit
from hfpaged.planner.model_facts import LayerKV
from hfpaged.planner.several_rows import prefix_bytes


def test_7b_with_32_sequences_of_2048_tokens_takes_34_gb():
    found = fit(case(prompt=1024, output=1024, concurrency=32))
    assert found.needed == 2 * 32 * 4096 * 2 * 2048 * 32 == 34_359_738_368


def test_7b_with_512_and_1024_tokens_takes_three_quarters_of_a_gib_for_each_request():
    assert fit(case()).request == 3 * GIB // 4 == 805_306_368


def test_an_80_gb_card_at_085_with_14_gb_of_weights_has_a_pool_of_54_gb_for_67_such_requests():
    found = fit(case())
    assert found.pool == 54 * GB
    assert found.sequences == 67
    assert found.pool // int(0.77 * GB) == 70  # where a request is taken as 0.77 GB


def test_what_the_dense_cache_would_take_is_told_beside_it():
    plain = fit(case(prompt=1024, output=1024, concurrency=32))
    assert plain.dense == plain.needed == 34_359_738_368
    shared = fit(case(prompt=1024, output=1024, concurrency=32, kv_format="int8", shared_prefix=512))
    assert shared.dense == 34_359_738_368
    assert shared.needed < 0.45 * shared.dense


def test_with_8_of_32_heads_a_quarter_is_enough():
    mha, gqa = fit(case()), fit(case(llama(kv_heads=8)))
    assert gqa.request * 4 == mha.request
    assert gqa.sequences == 268


def test_the_pool_is_what_weights_activations_overhead_and_others_leave():
    found = fit(case(overhead=2 * GB, activations=3 * GB, in_use=GB, utilization=0.9))
    assert found.pool == 72 * GB - 14 * GB - 2 * GB - 3 * GB - GB


def test_a_pool_that_is_given_does_not_ask_for_the_device():
    found = fit(case(pool=2 * GIB, memory=1))
    assert (found.pool, found.sequences) == (2 * GIB, 2)


def test_requests_take_whole_blocks():
    one, more = fit(case(prompt=1, output=15)), fit(case(prompt=1, output=16))
    assert more.request == 2 * one.request == 2 * one.layout.block_bytes


def test_as_many_as_fit_do_fit_and_one_more_does_not():
    most = fit(case()).sequences
    assert fit(case(concurrency=most)).fits
    too_many = fit(case(concurrency=most + 1))
    assert not too_many.fits
    assert too_many.short == too_many.needed - too_many.pool > 0


def test_the_longest_that_all_may_have_fits_and_a_block_more_does_not():
    found = fit(case(concurrency=32))
    longest = found.longest
    assert longest % 16 == 0
    assert fit(case(prompt=longest, output=0, concurrency=32)).fits
    assert not fit(case(prompt=longest + 1, output=0, concurrency=32)).fits


def test_no_request_is_longer_than_the_model_takes():
    assert fit(case()).longest == 8192


def test_one_request_as_long_as_the_context_must_fit_as_well():
    small = case(pool=GIB, context=8192)
    found = fit(small)
    assert found.sequences == 1
    assert not found.fits
    assert found.short == 4 * GIB - GIB


def test_a_common_prefix_is_stored_once_in_its_full_blocks():
    plain, shared = fit(case(concurrency=10)), fit(case(concurrency=10, shared_prefix=500))
    assert plain.needed - shared.needed == 9 * (500 // 16) * plain.layout.block_bytes
    assert shared.sequences > plain.sequences


def test_a_window_that_has_left_the_prefix_behind_shares_none_of_it():
    window = LayerKV("sliding", 32, 128, 128, window=64)
    facts = llama(layers=(window,) * 32)
    assert fit(case(facts, concurrency=8, shared_prefix=512)).needed == fit(case(facts, concurrency=8)).needed


@pytest.mark.parametrize("budget", [16, 100, 4096])
@pytest.mark.parametrize("tokens", [1, 64, 65, 300, 5000])
def test_what_fits_alone_is_what_a_server_does_not_refuse(tokens, budget):
    windows = llama(layers=(LayerKV("sliding", 4, 128, 128, window=64), LayerKV("full", 4, 128, 128)))
    found = fit(case(windows, prompt=tokens, output=0, concurrency=1, token_budget=budget))
    needs = BlockNeeds(found.layout.windows, found.layout.block_size, budget)
    assert found.needed == needs.at_most(tokens, 0) * found.layout.block_bytes
    asked = found.case.choosing(pool=found.needed)
    assert fit(asked).sequences >= 1
    assert fit(asked).longest >= tokens
    assert not fit(asked.choosing(pool=found.needed - 1)).fits


def test_what_passes_through_windows_is_there_once_and_only_for_prompts():
    windows = llama(layers=(LayerKV("sliding", 4, 128, 128, window=64),) * 32)
    one, ten = (fit(case(windows, prompt=4096, output=64, concurrency=count)) for count in (1, 10))
    assert one.passing == one.needed - one.request > 200 * one.layout.block_bytes
    assert ten.needed == 10 * one.request + one.passing
    assert fit(case()).passing == 0


def test_states_are_kept_for_each_sequence_and_none_of_them_grows():
    state = LayerKV("state", state_bytes=1000)
    facts = llama(layers=(*llama().layers, state))
    assert fit(case(facts)).request == fit(case()).request + 1000
    only = fit(case(llama(layers=(state,)), concurrency=7))
    assert (only.needed, only.longest) == (7000, 8192)


def test_a_model_that_keeps_nothing_takes_any_number():
    assert fit(case(llama(layers=()))).sequences == MANY


def test_keys_of_an_encoder_and_of_layers_that_are_not_paged_are_counted_beside_the_pool():
    layer = LayerKV("full", 32, 128, 128)
    cross = llama(cross_layers=(layer,) * 32)
    assert fit(case(cross, encoder=100)).request == fit(case()).request + 100 * 2 * 32 * 4096 * 2
    dense = llama(layers=(*llama().layers, LayerKV("dense", 32, 128, 128)))
    assert fit(case(dense)).request == fit(case()).request + 1536 * 2 * 4096 * 2


def test_ranks_split_all_but_the_norms():
    """Of Llama transformers splits embedding and head too: of 6.74 billion weights only 65 norms are whole."""
    one, four = fit(case()), fit(case(tp=4))
    assert four.request * 4 == one.request
    norms, total = 65 * 4096, 6_738_415_616
    assert four.weights.bytes == math.ceil(14 * GB * (norms + (total - norms) / 4) / total)


def test_replicas_share_what_is_asked_for_and_have_a_pool_each():
    one, three = fit(case(concurrency=100)), fit(case(concurrency=100, replicas=3))
    assert (three.pool, three.sequences, three.asked) == (one.pool, one.sequences, 34)
    assert three.needed == 34 * one.request
    assert (one.fits, three.fits) == (False, True)
    assert fit(case(replicas=3)).asked is None


def test_replicas_on_a_cpu_live_in_one_memory():
    cpu = {"memory": 64 * GB, "is_cpu": True, "in_use": 4 * GB, "weights": 5 * GB, "utilization": 0.5}
    assert fit(case(**cpu)).pool == 32 * GB - 4 * GB - 5 * GB
    assert fit(case(**cpu, replicas=2)).pool == 16 * GB - 2 * GB - 5 * GB


def test_a_prefix_that_all_share_lies_in_the_pool_of_each_replica():
    found = fit(case(shared_prefix=320, replicas=2))
    assert found.shared_blocks == 20
    assert prefix_bytes(found) == 20 * 16 * 2 * 32 * 4096 * 2


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"prompt": 10, "output": 10, "context": 16}, "are 20 tokens, more than context=16; raise --context"),
        ({"prompt": 0, "output": 0, "context": 16}, "raise --prompt or --output"),
        ({"prompt": 10, "output": 0, "context": 10, "shared_prefix": 11}, "longer than the prompts of 10 tokens"),
    ],
)
def test_workloads_that_cannot_be_are_refused_with_the_remedy(sizes, words):
    with pytest.raises(InvalidConfigError, match=words):
        Workload(**sizes)
