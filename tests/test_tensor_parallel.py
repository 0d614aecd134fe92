"""Models that two processes compute together: plain generate() with a PagedCache, in each of them."""

from __future__ import annotations

import socket

import pytest
import two_ranks
from tensor_parallel_cases import FAMILIES, FORMATS, WAYS

from hfpaged import tensor_parallel

WORKER = "tensor_parallel_worker.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All cases in one launch."""
    return two_ranks.once(tmp_path_factory, WORKER)


def same_tokens(run, case):
    """What both ranks gave, which is what one process and transformers' own cache give."""
    found = run.of(case)
    for rank in found:
        assert rank["paged"] == rank["plain"], case
    assert found[0]["paged"] == found[1]["paged"]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_each_rank_keeps_its_own_heads_and_all_where_they_do_not_divide(run, name):
    kept, layers = FAMILIES[name]
    for rank in same_tokens(run, f"family {name}"):
        assert rank["heads"] == [kept] * layers


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_generate_gives_the_tokens_of_one_process(run, name):
    same_tokens(run, f"way {name}")


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_keys_give_the_tokens_of_one_process_with_the_same_format(run, name):
    for rank in same_tokens(run, f"format {name}"):
        assert rank["format"] == name


@pytest.mark.parametrize("case", ["window", "chat", "default_cache"])
def test_forgetting_forking_cropping_and_the_default_cache(run, case):
    same_tokens(run, case)


def test_a_known_prompt_is_found_on_all_ranks(run):
    for rank in same_tokens(run, "prefixes"):
        assert rank["hits"] == rank["then"] == 49 + 28  # of 50 and 37 tokens, as far as the batch needs the columns


def test_ranks_evict_the_same_prefixes(run):
    first, second = same_tokens(run, "eviction")
    assert first["hits"] == second["hits"]
    assert first["hits"][-1] > 0
    assert first["evictions"] == second["evictions"] > 0


def test_a_pool_takes_half_the_bytes_where_heads_divide_and_all_where_not(run):
    for rank in run.of("pool_bytes"):
        for whole, half in rank.values():
            assert whole == 2 * half > 0
    for whole, replicated in run.of("replicated_bytes"):
        assert whole == replicated > 0


def test_pools_are_of_one_size_although_ranks_see_different_memory(run):
    first, second = run.of("sizes")
    assert first == second
    by_default, by_name = first["blocks"]
    # The smallest of 3 and 2 MiB, by half for two ranks on one machine, and half of that: 512 KiB.
    assert by_default == 2**19 // first["block_bytes"]
    assert first["max"] == by_default // 4
    assert by_name == 300_000 // first["block_bytes"]


def test_small_numbers_go_over_a_group_of_their_own(run):
    assert run.of("host_group") == [[(0, 1), (5, 5)]] * 2


def test_statistics_and_texts_say_which_rank_it_is(run):
    for number, rank in enumerate(run.of("told")):
        assert rank["stats"] == [number, 2]
        assert f"rank {number} of 2" in rank["pool"]
        assert f"rank {number} of 2" in rank["cache"]


def test_each_rank_saves_and_loads_its_own_prefixes(run):
    for rank in same_tokens(run, "saved_prefixes"):
        assert rank["files"] == [f"prefixes.rank{number}-of-2.safetensors" for number in range(2)]
        written, loaded = rank["blocks"]
        assert written == loaded > 0
        assert rank["hits"] > 0


def test_saved_prefixes_of_other_ranks_and_of_whole_models_are_refused(run):
    for number, rank in enumerate(run.of("saved_prefixes")):
        mine, other = f"rank {number} of 2", f"rank {1 - number} of 2"
        kinds = [(other, mine), (other, "one process"), ("one process", mine)]
        for error, (by, now) in zip(rank["errors"], kinds, strict=True):
            assert f"was saved by {by}, and this is {now}" in error


def test_ranks_with_other_prompts_or_other_draws_all_say_so(run):
    errors = [rank["error"] for rank in same_tokens(run, "other_prompts")] + run.of("other_seeds")
    for number, error in enumerate(errors):
        assert f"rank 0 and rank 1 of 2 differ (this is rank {number % 2})" in error
        assert "torch.manual_seed" in error


def test_ranks_with_other_kinds_of_caches_all_say_so(run):
    for number, rank in enumerate(same_tokens(run, "other_caches")):
        assert len(rank["errors"]) == 4
        for error in rank["errors"]:
            assert f"the caches, of this forward: rank 0 and rank 1 of 2 differ (this is rank {number})" in error


def test_a_cache_that_was_made_of_a_config_learns_of_the_ranks(run):
    for number, rank in enumerate(same_tokens(run, "config_cache")):
        assert f"below it, and this is rank {number} of 2" in rank["refused"]


def test_a_rank_that_waits_for_long_says_what_all_must_do(run):
    first, _ = same_tokens(run, "waiting")
    assert first["said"][0].startswith("rank 0 of 2 has waited for another rank")
    assert "a PagedCache on each of them" in first["said"][0]


def test_what_one_rank_has_forgotten_all_compute_again(run):
    first, second = same_tokens(run, "pools_differ")
    assert first["hits"] == second["hits"] == 0
    assert first["reports"][0].startswith("48 of 50 prompt tokens are known (48 of them are computed again")
    assert second["reports"][0].startswith("0 of 50 prompt tokens are known")


def test_garbage_of_one_rank_does_not_leave_it_without_blocks(run):
    first, second = same_tokens(run, "garbage")
    assert first["free"] < second["free"]  # before the batch
    assert not first["told"]
    assert not second["told"]


def test_garbage_of_one_rank_does_not_leave_it_without_blocks_in_a_chat(run):
    first, second = same_tokens(run, "garbage_in_a_chat")
    assert first["free"] < second["free"]


def test_a_difference_that_stays_is_told_once(run):
    for number, rank in enumerate(same_tokens(run, "pinned")):
        (warning,) = rank["warnings"]
        assert "have 29 to 32 free blocks before a forward" in warning
        assert f"this is rank {number} of 2" in warning


def test_a_pool_that_is_too_small_is_so_on_all_ranks(run):
    first, second = same_tokens(run, "too_small")
    assert first["error"] == second["error"]
    assert "of the pool's 4 are free" in first["error"]


def test_weights_that_are_parts_of_others_are_not_prepacked(run):
    for rank in same_tokens(run, "prepacked"):
        assert rank["layers"] == 0
        assert "DTensor" in rank["report"]


def test_what_cannot_be_split_so_is_refused_by_name(run):
    for number, errors in enumerate(run.of("refusals")):
        assert "4 query heads and 1 heads of keys and values do not divide by 2 ranks" in errors["heads"]
        assert "load_model()" in errors["heads"]
        assert "sequence_parallel" in errors["sequence"]
        assert "by other means than transformers' tensor parallelism" in errors["others"]
        assert f"this is rank {number} of 2 with heads of its own" in errors["scales"]
        assert "9 of the 21 tensors of LlamaForCausalLM are not in its files" in errors["lacking"]


@pytest.mark.skipif("lo" not in {name for _, name in socket.if_nameindex()}, reason="its loopback has another name")
@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "2"}, None),
    ],
    ids=["one machine", "told otherwise", "two machines", "not known"],
)
def test_ranks_of_one_machine_talk_over_its_loopback(environ, interface):
    tensor_parallel._stay_here(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface
