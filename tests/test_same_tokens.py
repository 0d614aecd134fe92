"""The one promise that counts: with a PagedCache a model generates what it generates with transformers' own cache."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from transformers import DynamicCache, set_seed

import hfpaged
from hfpaged import attention, compat
from hfpaged.handle import LazyKV

CACHE = compat.cache_argument()
NEW = 8
# Longer than every window of the table but that of mistral, which is crossed while tokens are generated.
WHOLE, RAGGED = [21, 21, 21], [4, 21, 13]


class Mode(NamedTuple):
    """A way to generate: arguments of generate(), and what else it needs."""

    arguments: dict[str, Any]
    is_single: bool = False  # one prompt only
    helper: str | None = None  # the assistant of assisted decoding
    embeds: bool = False
    turns: int = 1


GREEDY = {"do_sample": False, "output_logits": True}
MODES = {
    "greedy": Mode(GREEDY),
    "rows_end_early": Mode({"do_sample": False, "eos_token_id": list(range(3, 25))}),
    "sampled": Mode({"do_sample": True, "top_k": 20, "temperature": 1.5}),
    "return_sequences": Mode({"do_sample": True, "top_k": 20, "num_return_sequences": 3, "output_logits": True}),
    "beams": Mode({"num_beams": 3, "do_sample": False, "output_scores": True}),
    "beams_returned": Mode({"num_beams": 4, "do_sample": False, "num_return_sequences": 2, "output_scores": True}),
    "beams_sampled": Mode({"num_beams": 3, "do_sample": True, "top_k": 20}),
    "assisted": Mode({"do_sample": False}, is_single=True, helper="other"),
    "assisted_by_itself": Mode({"do_sample": False}, is_single=True, helper="same"),
    "prompt_lookup": Mode({"do_sample": False, "prompt_lookup_num_tokens": 3}, is_single=True),
    "chunked_prefill": Mode(GREEDY | {"prefill_chunk_size": 8}),
    "embeds": Mode(GREEDY, embeds=True),
    "chat": Mode(GREEDY, turns=3),
}
OWN_IMPLEMENTATION: list[tuple[str, str | None]] = [(name, None) for name in tiny_models.TABLE]
OWN_IMPLEMENTATION += [("llama", "eager"), ("mistral", "eager"), ("qwen3", "eager"), ("falcon", "eager")]
# What transformers cannot do with its own cache either: mpt loses all queries of a later turn.
IMPOSSIBLE = {("mpt", "chat")}
if compat.positive_crop_is_length():  # 5.17: refused for mpt, and its sliding layers fail when they record
    IMPOSSIBLE |= {("mpt", mode) for mode in ("assisted", "assisted_by_itself", "prompt_lookup")}
    IMPOSSIBLE |= {(name, "assisted_by_itself") for name in ("mistral", "gpt_oss")}
PADDINGS = {"whole": WHOLE, "left_padded": RAGGED}
# Unpatched, a model sees dense views, in which a row without padding beside others is like one that is alone: of whole
# batches, which have no mask, two ways will do.
CASES = [
    pytest.param(name, own, mode, lengths, is_patched, id="-".join([*filter(None, (name, own)), mode, padding, kind]))
    for name, own in OWN_IMPLEMENTATION
    for mode in MODES
    for padding, lengths in PADDINGS.items()
    for kind, is_patched in (("patched", True), ("unpatched", False))
    if (name, mode) not in IMPOSSIBLE and not (MODES[mode].is_single and lengths is RAGGED)
    if is_patched or lengths is RAGGED or MODES[mode].is_single or mode in ("greedy", "beams")
]


def generate(model, mode: Mode, cache, lengths: list[int], new: int = NEW) -> list[Any]:
    """The outputs of all turns."""
    inputs = tiny_models.prompts(lengths[1:2] if mode.is_single else lengths)
    if mode.is_single:  # something to look up
        inputs = {key: value.repeat(1, 2)[:, : lengths[1] + 5] for key, value in inputs.items()}
    if mode.embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    extra = {"assistant_model": helper(mode.helper, model)} if mode.helper else {}
    outputs = []
    for turn in range(mode.turns):
        set_seed(7)
        arguments = mode.arguments | extra | {CACHE: cache, "max_new_tokens": new, "return_dict_in_generate": True}
        outputs.append(model.generate(**inputs, **arguments))
        if turn + 1 < mode.turns:
            more = tiny_models.prompts([5 + turn] * len(inputs["input_ids"]), seed=turn + 1)
            answer = outputs[-1].sequences
            mask = torch.ones_like(answer)
            mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
            inputs = {
                "input_ids": torch.cat([answer, more["input_ids"]], dim=1),
                "attention_mask": torch.cat([mask, more["attention_mask"]], dim=1),
            }
    return outputs


def helper(kind: str, model: Any) -> Any:
    return tiny_models.shared("llama_mqa") if kind == "other" else model


@functools.cache
def expected(name: str, own: str | None, mode: str, lengths: tuple[int, ...], new: int = NEW) -> list[Any]:
    model = tiny_models.shared(name, own)
    return generate(model, MODES[mode], DynamicCache(config=model.config), list(lengths), new)


def assert_same(outputs: list[Any], wanted: list[Any]) -> None:
    for output, other in zip(outputs, wanted, strict=True):
        assert output.sequences.tolist() == other.sequences.tolist()
        for numbers in ("logits", "scores", "sequences_scores"):
            ours, theirs = getattr(output, numbers, None), getattr(other, numbers, None)
            assert (ours is None) == (theirs is None)
            if isinstance(ours, tuple):
                ours, theirs = torch.stack(ours), torch.stack(theirs)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def assert_all_free_once_dropped(pool: hfpaged.KVPool) -> None:
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks > 0  # at once: no garbage collector has to come by


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def dense_views(monkeypatch) -> list[LazyKV]:
    """Every dense view that is gathered for somebody who does not read blocks."""
    made: list[LazyKV] = []
    materialise = LazyKV.materialise

    def noted(self):
        made.append(self)
        return materialise(self)

    monkeypatch.setattr(LazyKV, "materialise", noted)
    return made


def paged(model, is_patched: bool, **sizes: Any) -> hfpaged.PagedCache:
    sizes = {"block_size": 4, "num_blocks": 600} | sizes
    return hfpaged.PagedCache(model, **sizes) if is_patched else hfpaged.PagedCache(config=model.config, **sizes)


@pytest.mark.parametrize(("name", "own", "mode", "lengths", "is_patched"), CASES)
def test_a_paged_cache_gives_the_tokens_of_a_dynamic_cache(name, own, mode, lengths, is_patched, dense_views):
    model = tiny_models.shared(name, own)
    wanted = expected(name, own, mode, tuple(lengths))
    dense_before = dict(attention.dense_calls)
    cache = paged(model, is_patched)
    try:
        outputs = generate(model, MODES[mode], cache, lengths)
    finally:
        hfpaged.unpatch(model)
    assert_same(outputs, wanted)
    has_kernels = is_patched and name not in (*tiny_models.OWN_ATTENTION, *tiny_models.LATENT)
    if has_kernels:
        assert attention.dense_calls == dense_before
        assert dense_views == []
    else:
        assert dense_views, "the cache was not used at all"
    assert all(output[CACHE] is cache for output in outputs if CACHE in output)
    pool = cache.pool
    pool.check_integrity()
    assert pool.num_free < pool.num_blocks
    dense_views.clear()
    del cache, outputs
    assert_all_free_once_dropped(pool)


EDGES = sorted(
    {length for size in (4, 16) for blocks in (1, 2) for length in range(size * blocks - 1, size * blocks + 2)}
)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, *EDGES])
@pytest.mark.parametrize("mode", ["greedy", "beams", "return_sequences"])
def test_prompts_that_end_at_the_edge_of_a_block_are_no_exception(block_size, length, mode):
    model = tiny_models.shared("llama")
    lengths = [length, length + 1, max(length - 1, 1)]
    wanted = expected("llama", None, mode, tuple(lengths), 5)
    cache = paged(model, True, block_size=block_size)
    try:
        outputs = generate(model, MODES[mode], cache, lengths, 5)
    finally:
        hfpaged.unpatch(model)
    assert_same(outputs, wanted)
    pool = cache.pool
    pool.check_integrity()
    del cache, outputs
    assert_all_free_once_dropped(pool)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("length", [10, 11, 12, 13, 22, 23, 24, 25])
@pytest.mark.parametrize("mode", ["greedy", "chunked_prefill", "beams", "chat"])
def test_prompts_that_end_at_the_edge_of_a_window_are_no_exception(name, length, mode):
    model = tiny_models.shared(name)
    lengths = [length, length - 1, length - 9]
    wanted = expected(name, None, mode, tuple(lengths), 5)
    cache = paged(model, True)
    try:
        assert_same(generate(model, MODES[mode], cache, lengths, 5), wanted)
    finally:
        hfpaged.unpatch(model)


@pytest.mark.parametrize("spelling", sorted({"past_key_values", CACHE}))
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_both_names_of_the_argument_work(spelling):
    model = tiny_models.shared("llama")
    wanted = expected("llama", None, "greedy", tuple(RAGGED))[0].sequences
    with hfpaged.patched(model):
        cache = paged(model, False)
        tokens = model.generate(**tiny_models.prompts(RAGGED), max_new_tokens=NEW, do_sample=False, **{spelling: cache})
        assert tokens.tolist() == wanted.tolist()
        assert cache.get_seq_length() == tokens.shape[1] - 1
        forward = model(**tiny_models.prompts(RAGGED), **{spelling: paged(model, False)})
        torch.testing.assert_close(
            forward.logits[:, -1], expected("llama", None, "greedy", tuple(RAGGED))[0].logits[0], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("kv_dtype", ["float32", torch.float32])
def test_a_cache_that_stores_float32_loses_nothing(kv_dtype):
    model = tiny_models.shared("llama")
    with hfpaged.patched(model):
        outputs = generate(model, MODES["greedy"], paged(model, False, kv_dtype=kv_dtype), RAGGED)
    assert_same(outputs, expected("llama", None, "greedy", tuple(RAGGED)))


# Largest difference of a probability that one rounding more or less of a key, a value or a sum may make, a few times
# over: 8 bits of mantissa in bfloat16, 11 in float16.
ROUNDING = {torch.bfloat16: 0.04, torch.float16: 0.006}


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_neox", "gpt2"])
def test_narrow_numbers_differ_by_their_own_rounding_only(name, dtype, is_patched):
    """Teacher-forced, so that one close call does not make all later tokens differ."""
    model = tiny_models.make(name).to(dtype)
    inputs = tiny_models.prompts([20, 26, 11])
    steps = tiny_models.prompts([16] * 3, seed=5)["input_ids"]
    exact = forced(tiny_models.shared(name), DynamicCache(config=model.config), inputs, steps)
    theirs = forced(model, DynamicCache(config=model.config), inputs, steps)
    ours = forced(model, paged(model, is_patched), inputs, steps)
    if not is_patched:
        assert torch.equal(ours, theirs)  # the same code over the same numbers
    assert (ours - theirs).abs().max() < ROUNDING[dtype]
    agreeing = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    assert agreeing > 0.9
    # and no further from the truth than transformers' own cache is
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean() + 1e-5


@torch.no_grad()
def forced(model, cache, inputs: dict[str, torch.Tensor], steps: torch.Tensor) -> torch.Tensor:
    """Probabilities [batch, steps + 1, vocabulary] when each step brings the next of `steps`."""
    mask, ids, probabilities = inputs["attention_mask"], inputs["input_ids"], []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for step in range(steps.shape[1] + 1):
        output = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}, logits_to_keep=1)
        probabilities.append(output.logits[:, -1].float().softmax(-1))
        if step < steps.shape[1]:
            ids, positions = steps[:, step : step + 1], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return torch.stack(probabilities, dim=1)
