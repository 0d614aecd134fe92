"""PagedCache as transformers' cache: forks, crops, rows, lengths, shared pools."""

from __future__ import annotations

import copy
import threading

import pytest
import tiny_models
import torch
from transformers import DynamicCache

import hfpaged
from hfpaged import attention, compat

CACHE = compat.cache_argument()


@pytest.fixture
def model():
    model = tiny_models.make("llama")
    return hfpaged.patch(model)


@pytest.fixture
def sliding():
    return hfpaged.patch(tiny_models.make("mistral"))


def paged(model, **sizes):
    return hfpaged.PagedCache(config=model.config, **({"block_size": 4, "num_blocks": 400} | sizes))


def dynamic(model):
    return DynamicCache(config=model.config)


def generate(model, cache, inputs, new=8, **arguments):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **{CACHE: cache}, **arguments).tolist()


@torch.no_grad()
def forward(model, cache, ids, **arguments):
    return model(ids, **{CACHE: cache}, **arguments).logits


def random_ids(batch, length, seed=0):
    return tiny_models.prompts([length] * batch, seed)["input_ids"]


def assert_same_next(model, cache, other, ids):
    """Both go on with the same numbers."""
    torch.testing.assert_close(forward(model, cache, ids), forward(model, other, ids), atol=1e-4, rtol=1e-4)


def assert_same_content(cache, other):
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


# Forks


def test_a_deepcopy_takes_no_block_and_both_go_on_by_themselves(model):
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, random_ids(2, 10))
    used = cache.stats().blocks_used
    fork, other_fork = copy.deepcopy(cache), copy.deepcopy(other)
    assert cache.stats().blocks_used == used
    for seed in range(3, 9):  # across the end of the block that both share
        assert_same_next(model, cache, other, random_ids(2, 1, seed))
        assert_same_next(model, fork, other_fork, random_ids(2, 1, seed + 10))
        cache.pool.check_integrity()
    assert_same_content(cache, other)
    assert_same_content(fork, other_fork)
    assert cache.stats().blocks_used < 2 * used + 4  # full blocks are still shared
    del cache
    assert_same_next(model, fork, other_fork, random_ids(2, 5))
    pool = fork.pool
    del fork
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("length", [1, 15, 16, 17, 19])
def test_a_system_prompt_is_prefilled_once_and_copied_for_each_question(model, length):
    """The recipe of transformers' documentation."""
    system = random_ids(1, length)
    prefix = paged(model, block_size=16)
    forward(model, prefix, system)
    for seed in range(1, 5):
        ids = torch.cat([system, random_ids(1, 3 + seed, seed)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert generate(model, copy.deepcopy(prefix), inputs) == generate(model, dynamic(model), inputs)
        prefix.pool.check_integrity()
        assert prefix.get_seq_length() == length
    assert prefix.stats().blocks_used == -(-length // 16)


def test_the_same_prompt_gives_the_same_text_four_times_among_others_on_one_pool(model):
    pool = paged(model).pool
    family = [random_ids(1, 13, 0), torch.cat([random_ids(1, 9, 0)[:, :8], random_ids(1, 5, 3)], dim=1)]
    wanted = [
        generate(model, dynamic(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}) for ids in family
    ]
    alive = []
    for _ in range(4):
        for ids, text in zip(family, wanted, strict=True):
            cache = hfpaged.PagedCache(config=model.config, pool=pool)
            assert generate(model, cache, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}) == text
            alive = [*alive[-2:], cache]  # some stay, some blocks are used again
            pool.check_integrity()
    del alive, cache
    assert pool.num_free == pool.num_blocks


# Crop


@pytest.mark.parametrize("removed", [0, -1, -4, -5, -12, -13])
def test_crop_takes_the_last_positions_off(model, removed):
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, random_ids(2, 13))
    kept = 13 + removed
    cache.crop(removed)
    assert cache.get_seq_length() == kept
    assert cache.stats().blocks_used == 2 * -(-kept // 4)
    other = dynamic(model)
    if kept:
        forward(model, other, random_ids(2, 13)[:, :kept])
        assert_same_content(cache, other)
    assert_same_next(model, cache, other, random_ids(2, 6, 1))
    cache.pool.check_integrity()


def test_crop_of_more_than_there_is_empties_the_cache(model):
    cache = paged(model)
    forward(model, cache, random_ids(2, 7))
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    assert cache.pool.num_free == cache.pool.num_blocks
    assert_same_next(model, cache, dynamic(model), random_ids(2, 9, 1))


@pytest.mark.skipif(compat.positive_crop_is_length(), reason="crop(n) keeps n here")
def test_crop_by_a_positive_number_is_an_error_as_in_transformers(model):
    cache = paged(model)
    forward(model, cache, random_ids(1, 7))
    with pytest.raises(ValueError, match=r"crop\(3\)"):
        cache.crop(3)
    assert cache.get_seq_length() == 7


def test_crop_goes_back_to_before_a_window_began_to_slide(sliding):
    cache, other = paged(sliding), dynamic(sliding)
    cache.activate_past_recording()
    forward(sliding, cache, random_ids(1, 31))
    cache.crop(-8)
    forward(sliding, other, random_ids(1, 31)[:, :23])
    assert_same_next(sliding, cache, other, random_ids(1, 5, 1))


def test_crop_of_a_fork_leaves_its_parent_alone(model):
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, random_ids(1, 11))
    fork = copy.deepcopy(cache)
    fork.crop(-2)
    forward(model, fork, random_ids(1, 2, 8))
    assert_same_content(cache, other)
    assert_same_next(model, cache, other, random_ids(1, 3, 1))


# Rows


ROWS = {
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select_twice": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 2])),
    "select_by_mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
}


@pytest.mark.parametrize("change", ROWS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_rows_change_as_in_a_dynamic_cache_and_nothing_is_copied(change, name):
    model = hfpaged.patch(tiny_models.make(name))
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, random_ids(3, 27))
    used = cache.stats().blocks_used
    for each in (cache, other):
        ROWS[change](each)
    assert cache.stats().blocks_used <= used
    cache.pool.check_integrity()
    assert_same_content(cache, other)
    batch = len(other.layers[0].keys)
    for seed in range(3):
        assert_same_next(model, cache, other, random_ids(batch, 1, seed + 1))
    cache.pool.check_integrity()


def test_rows_of_an_empty_cache_may_be_reordered(model):
    cache = paged(model)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_same_next(model, cache, dynamic(model), random_ids(2, 4))


@pytest.mark.parametrize("empty", ["free", "reset"])
def test_an_emptied_cache_serves_another_batch(model, empty):
    cache = paged(model)
    generate(model, cache, tiny_models.prompts([4, 9]))
    getattr(cache, empty)()
    assert cache.get_seq_length() == 0
    assert cache.pool.num_free == cache.pool.num_blocks
    inputs = tiny_models.prompts([7, 2, 11], seed=4)
    assert generate(model, cache, inputs) == generate(model, dynamic(model), inputs)


def test_a_cache_lives_as_long_as_somebody_holds_it_and_no_longer(model):
    cache = paged(model)
    output = model.generate(
        **tiny_models.prompts([5]), max_new_tokens=4, return_dict_in_generate=True, **{CACHE: cache}
    )
    pool = cache.pool
    assert output[CACHE] is cache
    assert output.past_key_values is cache
    del cache
    assert pool.stats().blocks_used == 2
    del output
    assert pool.num_free == pool.num_blocks


# What others read


@pytest.mark.parametrize("name", ["llama", "llama_mqa", "mistral", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
def test_keys_and_values_of_a_layer_are_those_of_a_dynamic_cache(name, is_patched):
    model = tiny_models.make(name)
    other = dynamic(model)
    forward(model, other, random_ids(2, 30))
    forward(model, other, random_ids(2, 3, 1))
    if is_patched:
        hfpaged.patch(model)
    cache = paged(model)
    assert cache.layers[0].keys is None
    forward(model, cache, random_ids(2, 30))
    forward(model, cache, random_ids(2, 3, 1))
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)


def test_padding_reads_as_zeros(model):
    inputs = tiny_models.prompts([4, 9, 1])
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    kept = inputs["attention_mask"].bool()
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(ours.keys.transpose(1, 2)[kept], theirs.keys.transpose(1, 2)[kept])
        assert not ours.keys.transpose(1, 2)[~kept].any()
    assert cache.stats().tokens == 4 + 9 + 1


@pytest.mark.parametrize("length", [22, 23, 24, 25, 26, 47, 48, 49])
def test_lengths_and_mask_sizes_follow_transformers_around_the_window(sliding, length):
    cache, other = paged(sliding), dynamic(sliding)
    for ids in (random_ids(1, length), random_ids(1, 1, 1), random_ids(1, 3, 2)):
        for each in (cache, other):
            forward(sliding, each, ids)
        for layer in range(2):
            assert cache.get_seq_length(layer) == other.get_seq_length(layer)
            assert cache.layers[layer].keys.shape == other.layers[layer].keys.shape
            for query in (1, 2, 23, 24, 25):
                assert cache.get_mask_sizes(query, layer) == other.get_mask_sizes(query, layer)
    assert cache.is_sliding == other.is_sliding
    assert [layer.get_max_length() for layer in cache.layers] == [24, 24]


def test_assigned_keys_are_what_the_next_step_sees(model):
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, random_ids(1, 9))
        each.layers[1].keys = each.layers[1].keys * 0.5
        each.layers[0].values = each.layers[0].values + 1
    assert_same_content(cache, other)
    assert_same_next(model, cache, other, random_ids(1, 3, 1))
    with pytest.raises(hfpaged.CacheMismatchError, match="12"):
        cache.layers[0].keys = torch.zeros(1, 2, 5, 12)


# Shared pools


def poison(cache, with_nan=float("nan")):
    """NaN in every block that nobody holds and that is no published prefix."""
    pool = cache.pool
    held = {block for sequence in cache._rows.sequences for table in sequence.tables for block in table.blocks}
    held |= pool.blocks.published()
    for store in pool.storage._stores.values():
        free = [block for block in range(len(store.key)) if block not in held]
        store.key[free], store.value[free] = with_nan, with_nan


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_was_in_a_free_block_never_matters(name, is_patched, beams):
    model = tiny_models.make(name)
    inputs = tiny_models.prompts([30, 6, 17])
    wanted = generate(model, dynamic(model), inputs, num_beams=beams)
    if is_patched:
        hfpaged.patch(model)
    resident = paged(model)
    short = tiny_models.prompts([9], seed=2)["input_ids"]
    forward(model, resident, short)
    keys = resident.layers[0].keys
    for _ in range(2):
        cache = hfpaged.PagedCache(config=model.config, pool=resident.pool)
        assert generate(model, cache, inputs, num_beams=beams) == wanted
        cache.free()
        poison(resident)
    assert torch.equal(resident.layers[0].keys, keys)
    other = dynamic(model)
    forward(model, other, short)
    assert_same_next(model, resident, other, random_ids(1, 4, 3))


def test_two_caches_take_turns_on_one_pool(model):
    first = paged(model)
    second = hfpaged.PagedCache(model, pool=first.pool)
    others = dynamic(model), dynamic(model)
    forward(model, first, random_ids(2, 6))
    forward(model, others[0], random_ids(2, 6))
    for seed in range(1, 10):
        assert_same_next(model, second, others[1], random_ids(3, 2, seed))
        assert_same_next(model, first, others[0], random_ids(2, 1, seed + 20))
        first.pool.check_integrity()
    used = first.stats().blocks_used
    second.free()
    assert first.stats().blocks_used == 2 * 4 < used
    assert_same_content(first, others[0])


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
def test_two_threads_generate_at_once_on_one_pool(is_patched):
    model = tiny_models.make("llama")
    batches = [tiny_models.prompts([5, 19, 11], seed=1), tiny_models.prompts([8, 3], seed=2)]
    wanted = [generate(model, dynamic(model), inputs, 24) for inputs in batches]
    if is_patched:
        hfpaged.patch(model)
    pool = paged(model).pool
    found: dict[int, list] = {0: [], 1: []}

    def work(index):
        try:
            for _ in range(4):
                cache = hfpaged.PagedCache(config=model.config, pool=pool)
                found[index].append(generate(model, cache, batches[index], 24))
        except BaseException as error:
            found[index].append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    for index, results in found.items():
        assert results == [wanted[index]] * 4
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_cache_made_in_inference_mode_goes_on_without_it(model, first):
    second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    cache, other = paged(model), dynamic(model)
    with first():
        model(random_ids(2, 6), **{CACHE: cache})
    forward(model, other, random_ids(2, 6))
    fork = copy.deepcopy(cache)
    for seed in range(1, 8):  # the storage grows meanwhile
        with second():
            logits = model(random_ids(2, 5, seed), **{CACHE: cache}).logits
        torch.testing.assert_close(logits.clone(), forward(model, other, random_ids(2, 5, seed)), atol=1e-4, rtol=1e-4)
    with first():
        model(random_ids(2, 3), **{CACHE: fork})
    cache.pool.check_integrity()


# Masks that are no left padding


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "falcon"])
@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("side", ["middle", "right", "both"])
def test_padding_in_the_middle_of_a_row_gives_the_right_tokens(name, is_patched, side):
    model = tiny_models.make(name)
    inputs = tiny_models.prompts([26, 26, 20])
    holes = {"middle": (slice(5, 9),), "right": (slice(22, 26),), "both": (slice(0, 2), slice(11, 12), slice(24, 26))}
    for hole in holes[side]:
        inputs["attention_mask"][1, hole] = 0
    wanted = generate(model, dynamic(model), inputs)
    if is_patched:
        hfpaged.patch(model)
    cache, before = paged(model), sum(attention.dense_calls.values())
    assert generate(model, cache, inputs) == wanted
    if is_patched and name != "falcon" and side != "right":
        assert sum(attention.dense_calls.values()) > before
    cache.pool.check_integrity()


def test_a_mask_that_hides_what_is_stored_gives_the_right_numbers(model):
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        forward(model, each, random_ids(2, 9))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 3:6] = 0
    for query, width in ((2, 11), (1, 12)):
        mask = torch.cat([mask, torch.ones(2, width - mask.shape[1], dtype=torch.long)], dim=1)
        ids = random_ids(2, query, width)
        ours, theirs = (forward(model, each, ids, attention_mask=mask) for each in (cache, other))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mask", "complaint"), [(torch.ones(2, 10, dtype=torch.long), "row 0, position 0"), (None, "all 9 positions")]
)
def test_a_mask_that_asks_for_padding_that_was_not_stored_is_refused(model, mask, complaint):
    inputs = tiny_models.prompts([4, 9])
    cache = paged(model)
    forward(model, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    with pytest.raises(hfpaged.CacheMismatchError, match=complaint):
        forward(model, cache, random_ids(2, 1), attention_mask=mask)
    cache.pool.check_integrity()


def test_a_ready_made_4d_mask_is_taken_as_it_is(model):
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[0, 0, :, 2] = False
    mask[0, 0, 2, 2] = True
    ours, theirs = (
        forward(model, each, random_ids(2, 9), attention_mask=mask) for each in (paged(model), dynamic(model))
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_equal_rows_are_stored_once_until_they_part(model):
    cache = paged(model)
    inputs = tiny_models.prompts([13])
    wanted = generate(model, dynamic(model), inputs, num_beams=4)
    generate(model, cache, inputs, 1, num_beams=4)
    assert cache.stats().blocks_used == 4
    cache.free()
    assert generate(model, cache, inputs, num_beams=4) == wanted
