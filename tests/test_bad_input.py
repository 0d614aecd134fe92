"""What cannot work: one named error with the numbers in it, and a pool that is whole afterwards."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
)

import hfpaged
from hfpaged import compat, rows

CACHE = compat.cache_argument()


@pytest.fixture
def model():
    return hfpaged.patch(tiny_models.make("llama"))


@pytest.fixture
def plain_model():
    return tiny_models.make("llama")


def paged(model, **sizes):
    return hfpaged.PagedCache(config=model.config, **({"block_size": 4, "num_blocks": 100} | sizes))


def generate(model, cache, inputs, new=6, **arguments):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **{CACHE: cache}, **arguments).tolist()


def expected(model, inputs, new=6):
    return generate(model, DynamicCache(config=model.config), inputs, new)


def assert_all_free(pool):
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks


# Sizes


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"block_size": 24}, r"block_size=24 is not a power of two.*use 16 or 32"),
        ({"block_size": 0}, r"block_size=0 is not a power of two"),
        ({"block_size": -16}, r"block_size=-16 is not"),
        ({"block_size": 16.0}, r"block_size=16.0 is not"),
        ({"block_size": "16"}, r"block_size=16 is not"),
        ({"block_size": 2048}, r"block_size=2048 is above 1024"),
        ({"memory": "12 apples"}, r"memory='12 apples' is no size.*2GiB"),
        ({"memory": 0}, r"memory=0 is 0 bytes"),
        ({"memory": -5}, r"memory=-5 is -5 bytes"),
        ({"memory": ""}, r"memory='' is no size"),
        ({"num_blocks": 0}, r"num_blocks=0 is too few.*at least 1"),
        ({"num_blocks": -3}, r"num_blocks=-3 is too few"),
        ({"num_blocks": 10, "memory": "1GiB"}, r"memory='1GiB' and num_blocks=10 both say"),
        ({"kv_dtype": "int3"}, r"kv_dtype='int3' is not known; use one of auto"),
        ({"kv_dtype": torch.int16}, r"kv_dtype='int16' is not known"),
        ({"kv_dtype": {"default": "int8", "layers": {99: "auto"}}}, r"layer 99 the format auto"),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["model", "config"])
def test_sizes_that_cannot_work_are_refused_at_once(plain_model, arguments, complaint, given):
    before = plain_model.config._attn_implementation
    source = {given: plain_model if given == "model" else plain_model.config}
    with pytest.raises(hfpaged.InvalidConfigError, match=complaint):
        hfpaged.PagedCache(**source, **arguments)
    assert plain_model.config._attn_implementation == before, "a refused cache must not patch"


def test_two_layer_groups_need_two_blocks():
    with pytest.raises(hfpaged.InvalidConfigError, match=r"num_blocks=1 is too few.*at least 2"):
        hfpaged.PagedCache(config=tiny_models.shared("gemma2").config, num_blocks=1)


def test_memory_for_less_than_one_block_is_refused_when_the_first_key_shows_its_size(model):
    cache = hfpaged.PagedCache(config=model.config, memory=100)
    with pytest.raises(hfpaged.InvalidConfigError, match=r"100 B hold 0 blocks of .* KiB \(16 tokens each\)"):
        generate(model, cache, tiny_models.prompts([5]))
    assert_all_free(cache.pool)


@pytest.mark.parametrize("memory", [20_000, "20kB", "0.02 MB"])
def test_memory_is_what_the_pool_takes_at_most(model, memory):
    cache = hfpaged.PagedCache(config=model.config, memory=memory)
    generate(model, cache, tiny_models.prompts([5]))
    assert cache.pool.num_blocks == 20_000 // (2 * 2 * 2 * 12 * 4 * 16)  # layers, K and V, heads, dim, bytes, tokens
    with pytest.raises(hfpaged.OutOfBlocksError):
        generate(model, cache, tiny_models.prompts([100]))
    assert cache.stats().bytes_reserved <= 20_000


# Models and configs


def test_both_or_neither_of_model_and_config_are_refused(plain_model):
    for arguments in ({}, {"model": plain_model, "config": plain_model.config}):
        with pytest.raises(hfpaged.InvalidConfigError, match=r"either a model or config=model\.config, and not both"):
            hfpaged.PagedCache(**arguments)
    assert plain_model.config._attn_implementation == "sdpa"


def test_a_config_in_the_place_of_the_model_is_refused(plain_model):
    with pytest.raises(hfpaged.InvalidConfigError, match=r"PagedCache\(config=\.\.\.\)"):
        hfpaged.PagedCache(plain_model.config)


def test_a_pool_with_a_size_is_refused(plain_model):
    pool = paged(plain_model).pool
    for size in ({"memory": "1GiB"}, {"num_blocks": 3}):
        with pytest.raises(hfpaged.InvalidConfigError, match="pool= brings its own size"):
            hfpaged.PagedCache(config=plain_model.config, pool=pool, **size)


def test_a_pool_of_other_layer_groups_is_refused(plain_model):
    pool = paged(plain_model).pool
    for name in ("mistral", "qwen3"):
        with pytest.raises(hfpaged.CacheMismatchError, match="of one model"):
            hfpaged.PagedCache(config=tiny_models.shared(name).config, pool=pool)
    assert_all_free(pool)


def test_an_encoder_decoder_is_refused_and_the_remedy_of_the_message_works():
    model = tiny_models.make_t5()
    inputs = tiny_models.prompts([6, 9])
    with pytest.raises(hfpaged.UnsupportedModelError, match="EncoderDecoderCache"):
        hfpaged.PagedCache(model)
    assert model.config._attn_implementation != compat.ATTENTION_NAME
    bare = hfpaged.PagedCache(config=model.config, block_size=4, num_blocks=100)
    with pytest.raises(hfpaged.UnsupportedModelError, match=r"PagedCache\(config=config\), DynamicCache\(config=conf"):
        generate(model, bare, inputs)
    assert_all_free(bare.pool)

    config = model.config.get_text_config(decoder=True)
    for arguments in ({}, {"num_beams": 3}):
        wanted = model.generate(**inputs, max_new_tokens=8, do_sample=False, **arguments).tolist()
        paged_half = hfpaged.PagedCache(config=config, block_size=4, num_blocks=100)
        cache = EncoderDecoderCache(paged_half, DynamicCache(config=config))
        assert generate(model, cache, inputs, 8, **arguments) == wanted
        assert paged_half.get_seq_length() == 8
        paged_half.pool.check_integrity()


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize(
    ("other", "complaint"),
    [("llama_mqa", r"layer 0 .*\(2, 12, 12.*given \(1, 12, 12"), ("qwen3", "asks for layer 2.* model of 2 layers")],
)
def test_a_cache_serves_one_model(is_patched, other, complaint):
    model, wrong = tiny_models.make("llama"), tiny_models.make(other)
    if is_patched:
        hfpaged.patch(model), hfpaged.patch(wrong)
    cache = paged(model)
    with torch.no_grad():
        model(tiny_models.prompts([8, 8])["input_ids"], **{CACHE: cache})
        used = cache.stats().blocks_used
        with pytest.raises(hfpaged.CacheMismatchError, match=complaint):
            wrong(tiny_models.prompts([1, 1])["input_ids"], **{CACHE: cache})
    cache.pool.check_integrity()
    if is_patched and other == "qwen3":
        assert (cache.get_seq_length(), cache.stats().blocks_used) == (8, used)
    cache.free()
    assert_all_free(cache.pool)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_size_cannot_change_half_way(plain_model, batch):
    cache = paged(plain_model)
    with torch.no_grad():
        plain_model(tiny_models.prompts([8, 8])["input_ids"], **{CACHE: cache})
        with pytest.raises(hfpaged.CacheMismatchError, match=f"holds 2 rows and the model brings {batch}"):
            plain_model(tiny_models.prompts([1] * batch)["input_ids"], **{CACHE: cache})
    cache.pool.check_integrity()
    assert (cache.get_seq_length(), cache.stats().blocks_used) == (8, 4)


# Too little memory


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize(("length", "new"), [(41, 2), (38, 30)], ids=["prompt", "half_way"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_full_pool_is_a_named_error_and_all_blocks_come_back(is_patched, length, new, name):
    model = tiny_models.make(name)
    wanted = expected(model, tiny_models.prompts([7, 12]), 9)
    if is_patched:
        hfpaged.patch(model)
    groups = len(paged(model).pool.groups)
    cache = paged(model, num_blocks=20 * groups)
    with pytest.raises(hfpaged.OutOfBlocksError, match=f"of the pool's {20 * groups} are free") as caught:
        generate(model, cache, tiny_models.prompts([length, length]), new)
    assert caught.value.needed > caught.value.free
    assert caught.value.total == 20 * groups
    assert str(caught.value.needed) in str(caught.value)
    assert "num_blocks=" in str(caught.value)
    assert_all_free(cache.pool)
    assert cache.get_seq_length() == 0
    # the same cache, and another one on the same pool, then serve what fits
    assert generate(model, cache, tiny_models.prompts([7, 12]), 9) == wanted
    cache.free()
    assert (
        generate(model, hfpaged.PagedCache(config=model.config, pool=cache.pool), tiny_models.prompts([7, 12]), 9)
        == wanted
    )


def test_a_cache_that_finds_no_block_leaves_its_neighbours_alone(model):
    inputs = tiny_models.prompts([9])
    wanted = expected(model, inputs, 20)
    neighbour = paged(model, num_blocks=10)
    generate(model, neighbour, inputs, 10)
    with pytest.raises(hfpaged.OutOfBlocksError):
        generate(model, hfpaged.PagedCache(config=model.config, pool=neighbour.pool), tiny_models.prompts([30]))
    neighbour.pool.check_integrity()
    more = {"input_ids": torch.tensor(wanted)[:, :19], "attention_mask": torch.ones(1, 19, dtype=torch.long)}
    assert generate(model, neighbour, more, 10) == wanted


# Gradients


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
def test_gradients_through_one_forward_are_right_and_through_an_earlier_one_are_refused(plain_model, is_patched):
    plain_model.requires_grad_(True)
    ids = tiny_models.prompts([6, 6])["input_ids"]
    plain_model(ids, labels=ids, use_cache=False).loss.backward()
    wanted = [parameter.grad for parameter in plain_model.parameters()]
    plain_model.zero_grad()
    if is_patched:
        hfpaged.patch(plain_model)
    cache = paged(plain_model)
    plain_model(ids, labels=ids, **{CACHE: cache}).loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in plain_model.parameters()], wanted)
    loss = plain_model(ids[:, :2], labels=ids[:, :2], **{CACHE: cache}).loss
    with pytest.raises(hfpaged.AutogradError, match=r"earlier forward.*torch\.no_grad\(\), or use DynamicCache"):
        loss.backward()
    cache.pool.check_integrity()
    cache.free()
    assert_all_free(cache.pool)


# Ctrl-C and other exceptions in the middle


class Interrupt:
    """Raises at the `at`-th call: a hook of a module, or a logits processor."""

    def __init__(self, at, error):
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("in the middle")


class InterruptingProcessor(LogitsProcessor):
    def __init__(self, interrupt):
        self.interrupt = interrupt

    def __call__(self, input_ids, scores):
        self.interrupt()
        return scores


PLACES = {
    "before_layer_0_has_stored": lambda layers: layers[0].self_attn.q_proj,
    "in_layer_0": lambda layers: layers[0].self_attn.o_proj,
    "between_layers": lambda layers: layers[0].mlp,
    "before_layer_1_has_stored": lambda layers: layers[1].self_attn.k_proj,
    "after_the_last_key": lambda layers: layers[1].mlp,
}


@pytest.mark.parametrize("error", [RuntimeError])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_exception_between_layers_leaves_the_cache_as_it_was_before_the_step(name, step, place, error):
    model = tiny_models.make(name)
    inputs = tiny_models.prompts([22, 9, 22])  # a decode step begins blocks, and the window of mistral slides
    inputs["input_ids"][2], inputs["attention_mask"][2] = inputs["input_ids"][0], 1  # shared until they part
    wanted = expected(model, inputs, 8)
    hfpaged.patch(model)
    cache = paged(model)
    interrupt = Interrupt(step, error)
    hook = PLACES[place](model.model.layers).register_forward_hook(interrupt)
    with pytest.raises(error, match="in the middle"):
        generate(model, cache, inputs, 8)
    hook.remove()
    length = 0 if step == 1 else 22 + step - 2
    assert cache.get_seq_length() == length
    assert [cache.get_seq_length(layer) for layer in range(2)] == [length] * 2
    cache.pool.check_integrity()
    assert cache.stats().blocks_used <= 3 * -(-length // 4)
    continue_and_compare(model, cache, inputs, wanted, max(length + 1, 22))


def continue_and_compare(model, cache, inputs, wanted, known):
    """generate() goes on from the first `known` positions and ends as if nothing had happened."""
    ids = torch.tensor(wanted)[:, :known]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), known - 22, dtype=torch.long)], dim=1)
    assert generate(model, cache, {"input_ids": ids, "attention_mask": mask}, 30 - known) == wanted
    pool = cache.pool
    pool.check_integrity()
    cache.free()
    assert_all_free(pool)


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("step", [1, 3])
def test_ctrl_c_between_steps_keeps_what_was_computed(is_patched, step):
    model = tiny_models.make("llama")
    inputs = tiny_models.prompts([22, 9, 17])
    wanted = expected(model, inputs, 8)
    if is_patched:
        hfpaged.patch(model)
    cache = paged(model)
    processors = LogitsProcessorList([InterruptingProcessor(Interrupt(step, KeyboardInterrupt))])
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, inputs, 8, logits_processor=processors)
    assert cache.get_seq_length() == 22 + step - 1
    cache.pool.check_integrity()
    continue_and_compare(model, cache, inputs, wanted, 22 + step)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("beams", [1, 3])
def test_an_interrupted_cache_gives_all_its_blocks_back_and_serves_again(place, step, is_patched, beams):
    model = tiny_models.make("llama")
    inputs = tiny_models.prompts([22, 9])
    wanted = expected(model, inputs)
    if is_patched:
        hfpaged.patch(model)
    cache = paged(model)
    hook = PLACES[place](model.model.layers).register_forward_hook(Interrupt(step, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, inputs, num_beams=beams)
    hook.remove()
    cache.pool.check_integrity()
    cache.free()
    assert_all_free(cache.pool)
    assert generate(model, cache, inputs) == wanted


@pytest.mark.parametrize("had_a_turn", [False, True])
def test_ctrl_c_in_the_middle_of_a_forward_is_undone_when_the_cache_is_used_again(had_a_turn):
    model = tiny_models.make("llama")
    inputs = tiny_models.prompts([9, 4, 22])
    arguments = {"max_new_tokens": 6, "do_sample": False}

    def with_first_turn(cache):
        before = {name: part[:, :15] for name, part in inputs.items()}
        if had_a_turn:
            with torch.no_grad():
                model(**before, **{compat.cache_argument(): cache})
        return {compat.cache_argument(): cache}

    wanted = model.generate(**inputs, **arguments, **with_first_turn(DynamicCache(config=model.config))).tolist()
    cache = hfpaged.PagedCache(model, block_size=4, num_blocks=100)
    with_first_turn(cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **arguments, **{compat.cache_argument(): cache})
    hook.remove()
    cache.pool.check_integrity()
    assert model.generate(**inputs, **arguments, **{compat.cache_argument(): cache}).tolist() == wanted
    cache.free()
    assert cache.pool.num_free == 100


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_of_an_interrupted_cache_holds_what_was_there_before_the_step(place):
    model = hfpaged.patch(tiny_models.make("llama"))
    inputs = tiny_models.prompts([22, 9, 17])
    wanted = expected(model, inputs, 8)
    cache = paged(model)
    hook = PLACES[place](model.model.layers).register_forward_hook(Interrupt(3, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, inputs, 8)
    hook.remove()
    child = copy.deepcopy(cache)
    assert child.get_seq_length() == 23
    cache.free()
    continue_and_compare(model, child, inputs, wanted, 24)


@pytest.mark.parametrize(("home", "name", "left"), [(rows, "build_step", 0), (rows.Rows, "_remember", 23)])
def test_ctrl_c_between_the_tables_and_the_first_key_of_a_step_leaves_no_token_too_many(monkeypatch, home, name, left):
    """Tables that have grown hold no keys yet. What they held is kept where no copy of theirs can be lost."""
    model = hfpaged.patch(tiny_models.make("llama"))
    inputs = tiny_models.prompts([22, 9, 17])
    wanted = expected(model, inputs, 8)
    cache, interrupt, function = paged(model), Interrupt(3, KeyboardInterrupt), getattr(home, name)

    def interrupted(*args):
        interrupt()
        return function(*args)

    monkeypatch.setattr(home, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, inputs, 8)
    cache.end_step(completed=False)
    assert cache.get_seq_length() == left
    continue_and_compare(model, cache, inputs, wanted, 24)


def test_heads_of_odd_size_cannot_be_packed_and_the_error_comes_before_any_key():
    config = GPT2Config(vocab_size=50, n_embd=36, n_head=4, n_layer=1, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    for name in ("int4", "k8v4", "auto/int4"):
        with pytest.raises(hfpaged.InvalidConfigError, match=r"head dim 9, which is odd; use int8, fp8_e4m3"):
            hfpaged.PagedCache(model, kv_dtype=name)
    ids = torch.tensor([[5, 6, 7, 8]])
    cache = hfpaged.PagedCache(model, kv_dtype="int8", block_size=4)
    model.generate(ids, max_new_tokens=6, do_sample=False, **{CACHE: cache})
    cache.pool.check_integrity()
    assert cache.get_seq_length() == 9
