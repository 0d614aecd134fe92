"""What plan reads in the config.json of every family is what the pool of a real model of that family is made of."""

from __future__ import annotations

import math

import family_models
import family_readme
import pytest
import tiny_models
import torch
import transformers
from family_runs import CACHE, prompts
from test_encoder_decoders import MODELS as ENCODER_DECODERS
from test_encoder_decoders import build as build_encoder_decoder
from test_encoder_decoders import generate as generate_encoder_decoder
from test_encoder_decoders import wrapped
from transformers import DynamicCache

import hfpaged
from hfpaged.errors import InvalidConfigError, UnsupportedModelError
from hfpaged.kv_format import resolve_format
from hfpaged.kv_storage import KVStorage
from hfpaged.layer_states import _tensors
from hfpaged.planner import families
from hfpaged.planner.model_reading import facts_of, read_model
from hfpaged.planner.pool_layout import cross_bytes, dense_bytes, layout_of
from hfpaged.row_cache import own_part
from hfpaged.verdict import NO_CACHE, REFUSED

pytestmark = pytest.mark.usefixtures("one_thread")

IS_RECORDED = families.recorded_version() == transformers.__version__
BLOCK = 4
FORMATS = ("auto", "int8", "fp8_e4m3", "k8v4", "int4")
FORMS = ("full", "short")  # all fields, and those that are not the family's defaults
# Mllama is shown a picture, of 5 positions at each of the two steps; CPM-Ant puts 32 positions before its prompts.
PICTURE = {"mllama": 10}


def as_file(config, form, tmp_path):
    """config.json as transformers writes it, in a folder for `read_model`."""
    path = tmp_path / f"{form}.json"
    path.write_text(config.to_json_string(use_diff=form == "short"), encoding="utf-8")
    return str(path)


def run(model, cache):
    """Two steps: 10 tokens are stored then."""
    given = {CACHE: cache, "max_new_tokens": 2, "do_sample": False, "num_return_sequences": 1}
    model.generate(**prompts(model, [9]), **given)
    return cache


def bytes_of(values):
    """Of all tensors, but for the numbers that a window is written as."""
    return sum(tensor.nbytes for tensor in _tensors(values) if tensor.dim())


def stored(cache, kv_format):
    """A storage with the stores that the layers of this cache would have in another format."""
    storage = KVStorage(BLOCK, resolve_format(kv_format))
    for group in cache.pool.groups:
        for place, layer in enumerate(group.layers):
            for store in cache.pool.layer_stores.get(layer, ()):
                heads, key_dim, value_dim, key_dtype, value_dtype, _ = store.signature
                key = torch.empty(1, heads, 1, key_dim, dtype=key_dtype)
                storage.store(place, key, torch.empty(1, heads, 1, value_dim, dtype=value_dtype), layer)
    return storage


def compare(facts, cache, dtype="float32", picture=0):
    """What plan says of blocks, of what lies beside them and of groups, against a cache that has been used."""
    tokens = cache.get_seq_length()
    windows = [group.window for group in cache.pool.groups]
    for kv_format in FORMATS:
        layout = layout_of(facts, kv_format, BLOCK, dtype=dtype)
        storage = stored(cache, kv_format)
        assert list(layout.windows) == windows
        assert layout.block_bytes == storage.block_bytes, kv_format
        assert layout.residual_bytes == len(windows) * storage.residual_bytes, kv_format
    layout = layout_of(facts, "auto", BLOCK, dtype=dtype)
    assert layout.block_bytes == cache.pool.storage.block_bytes
    held = sum(bytes_of(vars(own)) for layer in cache.layers if (own := own_part(layer)) is not None)
    assert layout.state_bytes + tokens * layout.token_bytes + cross_bytes(facts, picture, dtype=dtype) == held
    assert cache.pool.blocks.num_used <= layout.blocks(tokens)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", family_models.MODEL_TYPES)
def test_plan_foretells_the_pool_of_a_family(model_type, tmp_path):
    config = family_models.config_of(model_type)
    model = family_models.build(model_type)
    try:
        cache = run(model, hfpaged.PagedCache(config=model.config, block_size=BLOCK, num_blocks=200))
    except UnsupportedModelError:
        for form in FORMS:
            with pytest.raises(InvalidConfigError, match=f"{model_type}.*no keys and values"):
                read_model(as_file(config, form, tmp_path))
        return
    dense = run(model, DynamicCache(config=model.config))
    picture = PICTURE.get(model_type, 0)
    for form in FORMS:
        facts = read_model(as_file(config, form, tmp_path))
        compare(facts, cache, picture=picture)
        wanted = dense_bytes(facts, dense.get_seq_length(), dtype="float32") + cross_bytes(facts, picture)
        assert wanted == sum(bytes_of(vars(layer)) for layer in dense.layers)


@pytest.mark.skipif(not IS_RECORDED, reason="the record is of another version of transformers")
def test_plan_refuses_what_cannot_be_paged_and_nothing_else():
    """The test above would also pass if plan and PagedCache both refused everything."""
    refused = set()
    for model_type in family_models.MODEL_TYPES:
        try:
            facts_of(family_models.config_of(model_type).to_dict(), model_type)
        except InvalidConfigError:
            refused.add(model_type)
    record = family_readme.recorded()["families"]
    assert refused == {name for name, family in record.items() if family["outcome"] in (NO_CACHE, REFUSED)}
    assert len(refused) < 0.1 * len(record)


STATES = "axk2 bamba bailing_hybrid dots3_note_text falcon_h1 inkling_text jamba kimi_linear lara_mini lfm2 lfm3"
STATES += " nemotron_h olmo_hybrid qwen3_5_text qwen4_exp_text zamba zamba2 zaya"


@pytest.mark.parametrize("model_type", STATES.split())
def test_states_that_stay_in_float32_are_known(model_type):
    """Recurrent states are kept in float32 when the model computes in bfloat16, those of convolutions are not."""
    if model_type not in family_models.MODEL_TYPES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model = family_models.build(model_type).to(torch.bfloat16)
    cache = run(model, hfpaged.PagedCache(config=model.config, block_size=BLOCK, num_blocks=200))
    compare(facts_of(model.config.to_dict(), model_type), cache, "bfloat16")


@pytest.mark.parametrize("name", ["falcon", "gemma2", "gpt_oss", "mpt", "llama_mqa"])
def test_variants_of_families_are_foretold(name, tmp_path):
    """Falcon's new architecture for one, which groups its heads and stores the keys of all."""
    model = tiny_models.shared(name)
    cache = hfpaged.PagedCache(config=model.config, block_size=BLOCK, num_blocks=200)
    model.generate(torch.arange(3, 12)[None], **{CACHE: cache}, max_new_tokens=2, do_sample=False)
    for form in FORMS:
        compare(read_model(as_file(model.config, form, tmp_path)), cache)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_plan_foretells_both_caches_of_an_encoder_decoder(name, tmp_path):
    model = build_encoder_decoder(name)
    cache = wrapped(model.config)
    generate_encoder_decoder(model, "greedy", cache)
    cross = [layer for layer in cache.cross_attention_cache.layers if layer.is_initialized]
    for form in FORMS:
        facts = read_model(as_file(model.config, form, tmp_path))
        layout = layout_of(facts, dtype="float32")
        assert list(layout.windows) == [group.window for group in cache.self_attention_cache.pool.groups]
        assert layout.block_bytes == cache.self_attention_cache.pool.storage.block_bytes
        rows, encoder_tokens = cross[0].keys.shape[0], cross[0].keys.shape[2]
        assert rows * cross_bytes(facts, encoder_tokens, dtype="float32") == sum(
            layer.keys.nbytes + layer.values.nbytes for layer in cross
        )


def test_windows_need_one_block_more_than_they_fill(monkeypatch):
    """The most blocks at any length are those that plan says: no fewer, and at last no more."""
    model = family_models.build("mistral")
    cache = hfpaged.PagedCache(config=model.config, block_size=BLOCK, num_blocks=200)
    layout = layout_of(facts_of(model.config.to_dict(), "mistral"), block_size=BLOCK, dtype="float32")
    blocks, allocate, used = cache.pool.blocks, cache.pool.blocks.allocate, [0]

    def noting(count):
        taken = allocate(count)
        used.append(blocks.num_used)
        return taken

    monkeypatch.setattr(blocks, "allocate", noting)
    for length in range(1, 41):
        model(input_ids=torch.tensor([[length]]), **{CACHE: cache}, use_cache=True)
        assert max(used) <= layout.blocks(length)
    assert max(used) == layout.blocks(40) == math.ceil(layout.windows[0] / BLOCK) + 1
