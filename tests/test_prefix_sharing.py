"""What generate() returns with shared prefixes is what it returns without; and the common parts are computed once."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharing import (
    BLOCK,
    CACHE,
    assert_generates_the_same,
    counting,
    forward,
    generate,
    own,
    padded,
    paged,
    random_tokens,
)

import hfpaged
from hfpaged import prefix_sharing
from hfpaged.attention_code import stores_padding
from hfpaged.errors import OutOfBlocksError

NAMES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt_neox", "falcon"]
SYSTEM = random_tokens(5 * BLOCK + 3, 99)


@pytest.fixture(autouse=True)
def short_prompts_are_cut_too(monkeypatch):
    monkeypatch.setattr(prefix_sharing, "FORWARD_COST", 0)


@pytest.fixture
def model():
    model = tiny_models.shared("llama")
    yield model
    hfpaged.unpatch(model)


@pytest.fixture(params=NAMES)
def any_model(request):
    model = tiny_models.shared(request.param)
    yield model
    hfpaged.unpatch(model)


@pytest.fixture(params=["llama", "gemma2", "falcon"])
def some_model(request):
    model = tiny_models.shared(request.param)
    yield model
    hfpaged.unpatch(model)


def questions(*lengths, seed=0):
    return [SYSTEM + random_tokens(length, seed + number) for number, length in enumerate(lengths)]


def computed(model, cache, rows, new=1, **arguments):
    """Tokens that the model computes for this generate(), padding included."""
    with counting(model) as counted:
        generate(model, cache, rows, new, **arguments)
    return counted.tokens


# The same tokens and logits


def test_warm_prompts_of_any_padding_and_rows_that_begin_alike_are_generated_the_same(any_model):
    pool = paged(any_model).pool
    rows = questions(7, 2, 12)
    assert_generates_the_same(any_model, paged(any_model, pool), rows)
    for again in (rows, [*questions(20, 1, seed=5), random_tokens(9, 3)], [SYSTEM[:17]], rows[:1] * 3):
        hits = pool.stats().prefix_hits
        assert_generates_the_same(any_model, paged(any_model, pool), again)
        assert pool.stats().prefix_hits > hits or stores_padding(any_model)  # whose padded prompts are not shared
        gc.collect()
        assert pool.stats().blocks_used == 0


@pytest.mark.parametrize("length", [n * BLOCK + more for n in (1, 3) for more in (-1, 0, 1)])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompts_that_end_around_a_block(name, length):
    model = tiny_models.shared(name)
    pool, tokens = paged(model).pool, random_tokens(length, 4)
    for _ in range(2):
        assert_generates_the_same(model, paged(model, pool), [tokens], new=3)
    assert computed(model, paged(model, pool), [tokens]) == 1
    assert_generates_the_same(model, paged(model, pool), [tokens, tokens[: length - 1]], new=2)
    hfpaged.unpatch(model)


MODES = {
    "beams": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 8},
    "hidden_states": {"output_hidden_states": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ways_to_generate(name, mode):
    model = tiny_models.shared(name)
    pool = paged(model).pool
    for rows in (questions(4, 9), questions(4, 9), questions(6, seed=4)):
        ours = generate(model, paged(model, pool), rows, **MODES[mode])
        theirs = generate(model, own(model), rows, **MODES[mode])
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        if mode == "hidden_states":
            assert [state[0].shape for state in ours.hidden_states] == [
                state[0].shape for state in theirs.hidden_states
            ]
            for left, right in zip(ours.hidden_states, theirs.hidden_states, strict=True):
                for one, other in zip(left, right, strict=True):  # the last columns, which are no padding
                    torch.testing.assert_close(one[:, -len(SYSTEM) :], other[:, -len(SYSTEM) :], atol=1e-3, rtol=1e-3)
        pool.check_integrity()
    assert pool.prefixes.index.num_blocks > 0
    hfpaged.unpatch(model)


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_drafted_tokens_that_were_rejected_are_not_published(model, how):
    helper = tiny_models.make("llama", num_hidden_layers=1)
    extra = {"assistant_model": helper} if how == "assistant" else {"prompt_lookup_num_tokens": 3}
    pool, rows = paged(model).pool, [SYSTEM + SYSTEM[:20]]
    for new in (3 * BLOCK, 2 * BLOCK, 4 * BLOCK):
        ours = generate(model, paged(model, pool), rows, new, **extra)
        theirs = generate(model, own(model), rows, new)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        pool.check_integrity()
    assert_generates_the_same(model, paged(model, pool), [[*theirs.sequences[0].tolist(), 5]])


def test_rows_that_have_ended_and_get_pads_are_found_as_what_they_are(model):
    pool, rows = paged(model).pool, questions(3, 8, 5)
    ends = {"eos_token_id": list(range(3, 45)), "new": 3 * BLOCK}
    ours = assert_generates_the_same(model, paged(model, pool), rows, **ends)
    assert_generates_the_same(model, paged(model, pool), rows, **ends)
    assert (ours.sequences[:, -1] == 0).any()
    for row, prompt in enumerate(rows):
        answer = ours.sequences[row][-ends["new"] :].tolist()
        assert_generates_the_same(model, paged(model, pool), [[*prompt, *answer, 7]])


def test_embeddings_are_found_by_their_content(some_model):
    pool = paged(some_model).pool
    table = some_model.get_input_embeddings().weight.detach()
    for seed in (1, 1, 2):
        inputs = padded(*questions(6, 3))
        embeds = table[inputs["input_ids"]] + torch.randn(48, generator=torch.Generator().manual_seed(seed)) * 0.1
        given_inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
        hits = pool.stats().prefix_hits
        assert_generates_the_same(some_model, paged(some_model, pool), given_inputs)
        assert (pool.stats().prefix_hits > hits) == (hits == 0 and pool.stats().prefix_queries > 120 and seed == 1)


def test_positions_and_types_of_the_users_own(monkeypatch):
    model = tiny_models.shared("gpt2")
    pool, ids = paged(model).pool, torch.tensor([SYSTEM[:30]])
    plain = torch.arange(30)[None]
    for _ in range(2):
        for extra in (
            {"position_ids": plain},
            {"position_ids": plain + 5},
            {"position_ids": plain // 2},
            {"position_ids": plain, "token_type_ids": plain + 5},
            {"position_ids": plain, "token_type_ids": plain * 0},
            {},
        ):
            ours = forward(model, paged(model, pool), ids, logits_to_keep=1, **extra)
            theirs = forward(model, own(model), ids, logits_to_keep=1, **extra)
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert pool.stats().prefix_hits == 3 * BLOCK * 7  # each a second time, and positions that are given plain at once
    hfpaged.unpatch(model)


# What is computed


def test_the_second_call_computes_what_is_new(some_model):
    pool, rows = paged(some_model).pool, questions(7)
    assert computed(some_model, paged(some_model, pool), rows) == len(rows[0])
    assert computed(some_model, paged(some_model, pool), rows) <= BLOCK
    own_part = 9
    assert computed(some_model, paged(some_model, pool), questions(own_part, seed=3)) <= own_part + BLOCK


def test_the_common_part_of_a_batch_is_computed_and_stored_once(any_model):
    pool, rows = paged(any_model).pool, questions(*[6] * 8)
    cache = paged(any_model, pool)
    assert computed(any_model, cache, rows) == len(SYSTEM) + 8 * 6
    groups = len(pool.groups)
    shared, each = len(SYSTEM) // BLOCK, -(-len(rows[0]) // BLOCK) - len(SYSTEM) // BLOCK
    assert cache.stats().blocks_used <= groups * (shared + 8 * each)
    pool.check_integrity()


def test_equal_rows_are_computed_once(model):
    for cache, options in ((paged(model), {}), (paged(model), {"num_beams": 4}), (paged(model), {"do_sample": True})):
        rows = [SYSTEM] * 4 if not options else [SYSTEM]
        extra = {"num_return_sequences": 4} if "do_sample" in options else {}
        assert computed(model, cache, rows, **options, **extra) == len(SYSTEM) - 1 + 4


def test_two_families_in_one_batch(model):
    first, second = SYSTEM, random_tokens(30, 5)
    rows = [[*first, 1, 2], [*second, 4, 5], [*first, 3, 4], [*second, 6, 7], [*first, 8, 9]]
    assert computed(model, paged(model), rows) == len(first) + len(second) + 5 * 2
    assert_generates_the_same(model, paged(model), rows)


@pytest.mark.parametrize("keeps_answers", [True, False])
def test_a_chat_finds_all_that_was_generated(some_model, keeps_answers):
    """Also while the answers, and their caches with them, are still there."""
    pool, history, answers = paged(some_model).pool, SYSTEM, []
    for turn in range(3):
        cache = paged(some_model, pool)
        prompt = history + random_tokens(4, turn)
        with counting(some_model) as counted:
            ours = generate(some_model, cache, [prompt], new=2 * BLOCK)
        theirs = generate(some_model, own(some_model), [prompt], new=2 * BLOCK)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        if turn:  # the last token of an answer was never given to the model, and no block that is not full is known
            assert counted.forwards[0] <= 4 + BLOCK
        history = ours.sequences[0].tolist()
        answers += [ours] if keeps_answers else []
        del cache, ours  # which holds the cache too
    pool.check_integrity()


def test_a_warm_prompt_is_counted_once_and_what_is_recomputed_is_no_hit(model, monkeypatch):
    pool = paged(model).pool
    for expected in (0, len(SYSTEM) // BLOCK * BLOCK):
        before = pool.stats()
        generate(model, paged(model, pool), [SYSTEM], new=12)
        after = pool.stats()
        assert after.prefix_queries - before.prefix_queries == len(SYSTEM)
        assert after.prefix_hits - before.prefix_hits >= expected
        assert after.prefix_hits <= len(SYSTEM) - 1
    before = pool.stats()
    monkeypatch.setattr(prefix_sharing, "FORWARD_COST", 10**6)  # one forward for both rows
    generate(model, paged(model, pool), [SYSTEM, random_tokens(len(SYSTEM), 1)], new=1)
    assert pool.stats().prefix_hits == before.prefix_hits  # the rectangle has all columns of the second row


# Who may share


def test_publishing_can_be_forbidden_and_reading_cannot(model):
    pool = paged(model).pool
    generate(model, paged(model, pool, publish=False), questions(4, 5), new=2 * BLOCK)
    assert (pool.prefixes.index.num_blocks, pool.stats().blocks_cached) == (0, 0)
    generate(model, paged(model, pool), [SYSTEM], new=1)
    known = pool.prefixes.index.num_blocks
    assert computed(model, paged(model, pool, publish=False), questions(4)) <= 4 + BLOCK
    assert pool.prefixes.index.num_blocks == known
    rows = [*questions(3, 4), *(random_tokens(20, 7) + random_tokens(5, n) for n in range(3))]
    assert_generates_the_same(model, paged(model, pool, publish=False), rows)


def test_weights_that_change_between_two_calls_are_other_weights():
    model = tiny_models.make("llama")
    pool = paged(model).pool
    assert_generates_the_same(model, paged(model, pool), [SYSTEM])
    for change in (
        lambda: model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.1),
        lambda: model.model.embed_tokens.weight.add_(0.01),
        lambda: setattr(model.model.layers[1].mlp.up_proj.weight, "data", torch.randn(64, 48)),
    ):
        with torch.no_grad():
            change()
        hits = pool.stats().prefix_hits
        assert_generates_the_same(model, paged(model, pool), [SYSTEM])
        assert pool.stats().prefix_hits == hits


@pytest.mark.parametrize("mode", ["train", "grad"])
def test_training_shares_nothing(mode):
    model = tiny_models.make("llama")
    pool = paged(model).pool
    generate(model, paged(model, pool), [SYSTEM], new=1)
    model.train(mode == "train")
    with torch.set_grad_enabled(mode == "grad"):
        logits = model(torch.tensor([SYSTEM]), logits_to_keep=1, **{CACHE: paged(model, pool)}).logits
    assert logits.shape[1] == 1
    assert pool.stats().prefix_hits == 0


@pytest.mark.parametrize("arguments", [{}, {"output_hidden_states": True, "logits_to_keep": 1}, {"logits_to_keep": 7}])
def test_a_caller_gets_all_logits_and_states_that_it_asks_for(model, arguments):
    pool, ids = paged(model).pool, torch.tensor([SYSTEM])
    generate(model, paged(model, pool), [SYSTEM], new=1)
    with torch.no_grad():
        ours = model(ids, **{CACHE: paged(model, pool)}, **arguments)
        theirs = model(ids, **{CACHE: own(model)}, **arguments)
    assert ours.logits.shape[1] == arguments.get("logits_to_keep", len(SYSTEM))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    for left, right in zip(ours.hidden_states or (), theirs.hidden_states or (), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    pool.check_integrity()


# Pins


def test_a_pinned_prompt_stays_and_dropped_ones_go(model):
    cache = paged(model, num_blocks=14)
    pool = cache.pool
    assert pool.pin_prefix(SYSTEM) == 0
    generate(model, cache, [SYSTEM], new=1)
    generate(model, paged(model, pool, salt="a"), [SYSTEM], new=1)
    assert pool.pin_prefix(torch.tensor([SYSTEM])) == 5 * BLOCK
    assert pool.pin_prefix(SYSTEM, salt="b") == pool.pin_prefix(SYSTEM, adapter="a") == 0
    del cache
    assert pool.drop_prefixes() == 5
    for seed in range(3):
        generate(model, paged(model, pool), [random_tokens(6 * BLOCK, seed)], new=1)
    assert computed(model, paged(model, pool), [SYSTEM]) == len(SYSTEM) - 5 * BLOCK
    assert pool.unpin_prefix(SYSTEM)
    assert not pool.unpin_prefix(SYSTEM)
    gc.collect()
    assert pool.stats().blocks_used == 0
    pool.drop_prefixes()
    assert pool.stats().blocks_cached == 0
    with pytest.raises(hfpaged.InvalidConfigError, match=r"shape \(2, 3\)"):
        pool.pin_prefix(torch.ones(2, 3))


# Things go wrong


@pytest.mark.parametrize("name", ["llama", "falcon", "deepseek_v3"])
def test_crop_then_continue(name):
    model = tiny_models.shared(name)
    pool = paged(model).pool
    ours, theirs = paged(model, pool), own(model)
    more = random_tokens(2 * BLOCK, 5)
    for cache in (ours, theirs):
        forward(model, cache, SYSTEM[:10])
        forward(model, cache, more[:3])
        cache.crop(-5)
    for cache in (ours, theirs):
        forward(model, cache, more)
    del ours
    assert_generates_the_same(model, paged(model, pool), [SYSTEM[:8] + more + [4]])
    assert_generates_the_same(model, paged(model, pool), [SYSTEM[:10] + more])
    gc.collect()
    assert pool.stats().blocks_used == 0


def test_out_of_blocks_leaves_the_pool_whole_and_the_next_call_right(model):
    pool = paged(model, num_blocks=12).pool
    for rows, new in ((questions(5, 9), 60), ([random_tokens(95, 1)], 9), (questions(20, 30, 40), 1)):
        with pytest.raises(OutOfBlocksError):
            generate(model, paged(model, pool), rows, new)
        gc.collect()
        pool.check_integrity()
        assert pool.stats().blocks_used == 0
        assert_generates_the_same(model, paged(model, pool), questions(5, 9))


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "number", "publish"),
    [
        (Broken, 0, True),
        (Broken, 1, False),
        (Broken, 9, True),
        (KeyboardInterrupt, 0, False),
        (KeyboardInterrupt, 1, True),
        (KeyboardInterrupt, 2, True),
    ],
)
def test_a_forward_that_breaks_half_way_publishes_nothing_that_is_half_written(error, number, publish):
    """The first forwards are those of pieces."""
    model = tiny_models.make("gemma2")
    pool, rows = paged(model).pool, [*questions(3, 5), *(random_tokens(20, 7) + random_tokens(4, n) for n in range(2))]
    left = [number]

    def interrupt(module, args, output):
        left[0] -= 1
        if left[0] < 0:
            raise error

    hook = model.model.layers[2].register_forward_hook(interrupt)
    cache = paged(model, pool, publish=publish)
    with pytest.raises(error):
        generate(model, cache, rows, new=12)
    hook.remove()
    assert_generates_the_same(model, paged(model, pool), rows)
    if number == 0:
        assert_generates_the_same(model, cache, rows)
    del cache
    gc.collect()
    pool.check_integrity()
    assert pool.stats().blocks_used == 0
    assert_generates_the_same(model, paged(model, pool), rows)


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 1])
def test_after_a_forward_that_broke_behind_a_known_prefix_the_cache_serves_another_prompt(error, layer):
    model = tiny_models.make("llama")
    pool, broken = paged(model).pool, random_tokens(41, 7)
    generate(model, paged(model, pool), [[*broken, 5]])
    cache = paged(model, pool)

    def interrupt(module, args, output):
        raise error

    hook = model.model.layers[layer].register_forward_hook(interrupt)
    with pytest.raises(error):
        generate(model, cache, [[*broken, 6]])
    hook.remove()
    assert_generates_the_same(model, cache, questions(3, 9))
    pool.check_integrity()


def test_threads_on_one_pool_get_their_own_answers(model):
    pool = paged(model, num_blocks=120).pool
    jobs = [questions(3 + seed, 9, seed=seed) for seed in range(4)]
    expected = [generate(model, own(model), rows, 10).sequences.tolist() for rows in jobs]
    wrong = []

    def work(offset):
        for turn in range(4):
            job = (turn + offset) % len(jobs)
            cache = hfpaged.PagedCache(model, pool=pool)
            inputs = padded(*jobs[job])
            got = model.generate(**inputs, **{CACHE: cache}, do_sample=False, max_new_tokens=10).tolist()
            if got != expected[job]:
                wrong.append((offset, turn))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    pool.check_integrity()
    assert pool.stats().blocks_used == 0


def test_the_recipe_for_a_shared_system_prompt_takes_blocks_for_what_is_new_only(some_model):
    """transformers' documentation: prefill the prompt, copy the cache for each question."""
    cache = paged(some_model)
    with torch.no_grad():
        cache = some_model(torch.tensor([SYSTEM]), **{CACHE: cache}).past_key_values
    used = cache.stats().blocks_used
    expected, answers, copies = [], [], []
    for question in questions(4, 7, 5):
        copies.append(copy.deepcopy(cache))
        inputs = padded(question)
        answers.append(some_model.generate(**inputs, **{CACHE: copies[-1]}, max_new_tokens=3, do_sample=False).tolist())
        expected.append(
            some_model.generate(**inputs, **{CACHE: own(some_model)}, max_new_tokens=3, do_sample=False).tolist()
        )
    assert answers == expected
    groups = len(cache.pool.groups)
    assert cache.stats().blocks_used <= used + 3 * 3 * groups  # a copied last block, and two for 3 + 7 + 3 tokens
    cache.pool.check_integrity()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(["llama", "gemma2", "mistral"]), num_blocks=st.integers(20, 60))
def test_any_interleaving_on_a_small_pool_gives_the_tokens_of_fresh_runs(data, name, num_blocks):
    model = tiny_models.shared(name)
    pool = paged(model, num_blocks=num_blocks * 2).pool
    texts = [SYSTEM, SYSTEM[:13], random_tokens(40, 1), SYSTEM[:20] + random_tokens(15, 2)]
    kept = []  # (cache, its tokens): of one row each
    for _ in range(data.draw(st.integers(2, 7))):
        action = data.draw(st.sampled_from(["generate", "generate", "batch", "fork", "crop", "abort", "drop", "go_on"]))
        try:
            act(model, pool, kept, texts, action, data)
        except OutOfBlocksError:
            kept.clear()
        pool.check_integrity()
    kept.clear()
    gc.collect()
    assert pool.stats().blocks_used == 0
    hfpaged.unpatch(model)


def act(model, pool, kept, texts, action, data):
    if action in ("generate", "batch"):
        number = 1 if action == "generate" else 3
        rows = [
            data.draw(st.sampled_from(texts))
            + random_tokens(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3)))
            for _ in range(number)
        ]
        cache = paged(model, pool, publish=data.draw(st.booleans()))
        out = assert_generates_the_same(model, cache, rows, data.draw(st.sampled_from([1, 4, 12])))
        if number == 1:
            kept.append((cache, out.sequences[0].tolist()))
    elif action == "drop":
        pool.drop_prefixes()
    elif kept:
        number = data.draw(st.integers(0, len(kept) - 1))
        cache, tokens = kept[number]
        if action == "fork":
            kept.append((copy.deepcopy(cache), tokens))
        elif action == "abort":
            del kept[number]
        elif action == "crop" and all(group.window is None for group in pool.groups):
            count = data.draw(st.integers(1, 12))
            cache.crop(-count)
            kept[number] = (cache, tokens[: max(cache.get_seq_length(), 1)])
        elif action == "go_on":
            del kept[number]  # whatever comes of it
            longer = tokens + random_tokens(3, data.draw(st.integers(0, 2)))
            out = assert_generates_the_same(model, cache, [longer], new=5)
            kept.append((cache, out.sequences[0].tolist()))
