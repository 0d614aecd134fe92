"""Models spread by accelerate under the batcher, and what is known of their weights while these lie elsewhere."""

from __future__ import annotations

import accelerate
import pytest
import tiny_models
import torch
from test_ecosystem_device_map import SPREADS
from transformers import AutoModelForCausalLM, DynamicCache

import hfpaged
from hfpaged import ContinuousBatcher, attention, compat, part_store, pool_memory
from hfpaged.config import parse_bytes
from hfpaged.engine import sizing
from hfpaged.errors import InvalidConfigError, PrefixFileError
from hfpaged.fingerprint import has_hidden_weights, model_fingerprint, weights_of
from hfpaged.spread import execution_device, in_runs, input_device, layer_device

pytestmark = pytest.mark.usefixtures("one_thread")
CACHE = compat.cache_argument()
PROMPTS = [list(range(3, 60)), list(range(3, 40)), [5, 6, 7]]
NEW = 8


def native(model, prompt, **settings):
    """New tokens of generate() with transformers' own cache, a row for each that is returned."""
    ids = torch.tensor([prompt])
    rows = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
        **{CACHE: DynamicCache(config=model.config)}, **settings,
    ).tolist()  # fmt: skip
    return [row[len(prompt) :] for row in rows]


def batcher_of(model, **sizes):
    return ContinuousBatcher(model, **{"num_blocks": 200} | sizes)


def fingerprint(model):
    return model_fingerprint(model, model.config.to_dict())


def tokens(batcher, prompts=PROMPTS):
    return [list(output.token_ids) for output in batcher.generate(prompts, max_new_tokens=NEW, do_sample=False)]


# The batcher


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("spread", SPREADS)
def test_a_batcher_computes_a_spread_model(name, spread, tmp_path):
    """Greedy, shared prefixes, beams whose blocks are copied on write; all as the same hooked model without us."""
    model = SPREADS[spread](tiny_models.make(name), tmp_path)
    wanted = [native(model, prompt)[0] for prompt in PROMPTS]
    beams = native(model, PROMPTS[0], num_beams=3, num_return_sequences=2)
    dense = dict(attention.dense_calls)
    with batcher_of(model) as batcher:
        assert tokens(batcher) == wanted
        assert tokens(batcher) == wanted
        assert batcher.pool.stats().prefix_hits >= 48  # the first prompt's blocks, at the second time
        found = batcher.generate(PROMPTS[:1], max_new_tokens=NEW, do_sample=False, num_beams=3, num_return_sequences=2)
        assert [list(each.token_ids) for each in found[0].sequences] == beams
        told = batcher.describe()
        assert told["devices"] == "cpu"
        assert told["forward"] == "packed"
        batcher.pool.check_integrity()
        assert batcher.pool.num_free == 200
    assert attention.dense_calls == dense


@pytest.mark.parametrize("spread", ["all_in_cpu_memory", "all_on_disk"])
def test_quantized_blocks_of_an_offloaded_model_are_those_of_the_plain_one(spread, tmp_path):
    wanted = tokens(batcher_of(tiny_models.make("llama"), kv_dtype="int8"))
    with batcher_of(SPREADS[spread](tiny_models.make("llama"), tmp_path), kv_dtype="int8") as batcher:
        assert tokens(batcher) == wanted


def test_a_model_that_does_not_fit_is_loaded_by_device_map_auto(tmp_path):
    plain = tiny_models.make("llama", num_hidden_layers=4)
    plain.save_pretrained(tmp_path / "saved")
    most = sum(parameter.nbytes for parameter in plain.parameters()) // 2
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map="auto", max_memory={"cpu": most}, offload_folder=tmp_path / "offloaded"
    )
    model.generation_config.eos_token_id = None
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    wanted = [native(plain, prompt)[0] for prompt in PROMPTS]
    assert [native(model, prompt)[0] for prompt in PROMPTS] == wanted
    assert fingerprint(model) == fingerprint(plain)
    cache = hfpaged.PagedCache(model, num_blocks=99)
    ids = torch.tensor([PROMPTS[0]])
    assert (
        model.generate(ids, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})[0, ids.shape[1] :].tolist()
        == wanted[0]
    )
    with batcher_of(model) as batcher:
        assert tokens(batcher) == wanted


def test_nothing_is_prepacked_that_lies_elsewhere(tmp_path):
    model = SPREADS["a_layer_on_disk"](tiny_models.make("llama"), tmp_path)
    batcher = batcher_of(model, prepack=True)
    wanted = tokens(batcher)
    assert "the weight is on meta" in batcher.describe()["weights"]
    batcher.close()
    assert wanted == [native(model, prompt)[0] for prompt in PROMPTS]


def test_the_shadow_and_the_warm_up_go_where_the_model_computes(tmp_path):
    model = SPREADS["all_in_cpu_memory"](tiny_models.make("llama"), tmp_path)
    compared = []
    with batcher_of(model, shadow=1.0, kv_dtype="int8") as batcher:
        batcher.hooks.append(lambda event: compared.append(event) if type(event).__name__ == "ShadowCompared" else None)
        batcher.warm_up()
        tokens(batcher)
        while batcher.loop.work_spare():
            pass
    assert len(compared[0].kl) == NEW
    assert 0 < max(compared[0].kl) < 0.1


def test_graphs_are_not_recorded_of_hooked_modules(tmp_path):
    from hfpaged.engine.graph_support import why_no_graphs

    with batcher_of(SPREADS["hooks_alone"](tiny_models.make("llama"), tmp_path)) as batcher:
        assert "accelerate's hooks" in why_no_graphs(batcher._parts.runner, device_type="cpu")


# Fingerprints


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_an_offloaded_model_has_the_fingerprint_of_the_plain_one(name, spread, tmp_path):
    model = tiny_models.make(name)
    before = fingerprint(model)
    SPREADS[spread](model, tmp_path)
    assert fingerprint(model) == before
    assert weights_of(model).devices == ("cpu",)
    assert not has_hidden_weights(model)
    assert input_device(model) == torch.device("cpu")
    assert layer_device(model, 0) == layer_device(model, 1) == torch.device("cpu")
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    assert fingerprint(model) == before


def test_the_device_of_a_layer_is_not_guessed_where_a_vision_tower_has_its_number_too():
    model = torch.nn.Module()
    for name, device in (("vision", "meta"), ("text", "cpu")):
        layer = torch.nn.Linear(2, 2, device=device)
        layer.layer_idx = 0
        model.add_module(name, layer)
    assert layer_device(model, 0) is None
    model.vision.layer_idx = 1
    assert layer_device(model, 0) == torch.device("cpu")
    assert layer_device(model, 2) is None


def test_offloaded_weights_that_change_are_seen(tmp_path):
    model = accelerate.cpu_offload(tiny_models.make("llama"), "cpu")
    before, layer = fingerprint(model), model.model.layers[0].mlp.up_proj
    layer._hf_hook.weights_map["weight"].add_(1)
    assert fingerprint(model) != before


@pytest.mark.parametrize("spread", ["all_in_cpu_memory", "all_on_disk"])
def test_offloaded_models_with_other_weights_find_nothing_of_each_other(spread, tmp_path):
    first, second = tiny_models.make("llama"), tiny_models.make("llama")
    with torch.no_grad():
        second.model.layers[0].self_attn.v_proj.weight.neg_()
    wanted = native(second, PROMPTS[0])[0]
    SPREADS[spread](first, tmp_path / "1"), SPREADS[spread](second, tmp_path / "2")
    with batcher_of(first) as batcher:
        tokens(batcher)
        batcher.pool.save_prefixes(tmp_path / "prefixes")
        pool = batcher.pool
    with ContinuousBatcher(second, pool=pool) as batcher:
        assert tokens(batcher)[0] == wanted
    with batcher_of(second) as batcher, pytest.raises(PrefixFileError, match="weights"):
        batcher.pool.load_prefixes(tmp_path / "prefixes")


@pytest.mark.parametrize("spread", SPREADS)
def test_prefixes_go_from_a_plain_model_to_a_spread_one_and_back(spread, tmp_path):
    plain, model = tiny_models.make("llama"), SPREADS[spread](tiny_models.make("llama"), tmp_path)
    for number, (writer, reader) in enumerate([(plain, model), (model, plain)]):
        with batcher_of(writer) as batcher:
            wanted = tokens(batcher)
            assert batcher.pool.save_prefixes(tmp_path / str(number)).blocks == 4
        with batcher_of(reader) as batcher:
            assert batcher.pool.load_prefixes(tmp_path / str(number)).blocks == 4
            assert tokens(batcher) == wanted
            assert batcher.pool.stats().prefix_hits >= 48


def hide_weights(model):
    """As an offloader that we do not know would: numbers come with a hook of its own."""
    hidden = model.model.layers[1].mlp.up_proj
    weight = hidden.weight

    def bring(module, *_):
        module.weight = weight

    def take_away(module, *_):
        module.weight = torch.nn.Parameter(weight.to("meta"))

    bring.__module__ = take_away.__module__ = "accelerate.of_tomorrow"
    hidden.register_forward_pre_hook(bring), hidden.register_forward_hook(take_away)
    take_away(hidden)


def test_weights_that_nobody_can_read_share_nothing():
    model = tiny_models.make("llama")
    wanted = [native(model, prompt)[0] for prompt in PROMPTS]
    hide_weights(model)
    assert has_hidden_weights(model)
    assert fingerprint(model) != fingerprint(model)
    cache = hfpaged.PagedCache(model, num_blocks=99)
    for _ in range(2):
        cache.reset()
        ids = torch.tensor([PROMPTS[0]])
        found = model.generate(ids, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
        assert found[0, ids.shape[1] :].tolist() == wanted[0]
    assert "nobody can read" in cache.explain_last()[0].declined
    with batcher_of(model) as batcher:
        assert tokens(batcher) == wanted
        together = batcher.pool.stats().prefix_hits  # those that came at the same time
        assert tokens(batcher) == wanted
        assert batcher.pool.stats().prefix_hits == 2 * together < 48 + together


# Devices


def test_devices_in_words():
    assert in_runs([]) == ""
    assert in_runs(["cpu"]) == "cpu"
    assert in_runs(["cpu", "cpu", "cuda:0", "cpu"]) == "cpu x 2, cuda:0, cpu"


def test_the_device_of_a_module_is_its_hooks():
    linear = torch.nn.Linear(2, 2)
    assert execution_device(linear) is None
    accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.AlignDevicesHook("cpu"))
    accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.ModelHook(), append=True)
    assert execution_device(linear) == torch.device("cpu")
    assert input_device(torch.nn.Linear(2, 2, device="meta")) == torch.device("meta")


class Recorder:
    """A storage factory: makes all on the CPU and remembers for which device."""

    def __init__(self, monkeypatch):
        self.made = []
        monkeypatch.setattr(part_store, "_empty", self.empty)

    def empty(self, shape, dtype, device):
        self.made.append((shape, dtype, device))
        return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_storage_is_made_on_the_device_of_the_keys(monkeypatch, kv_dtype):
    """meta stands for a second device: a layer whose keys come from there has its blocks there."""
    recorder = Recorder(monkeypatch)
    cache = hfpaged.PagedCache(config=tiny_models.shared("llama").config, num_blocks=8, kv_dtype=kv_dtype)
    for layer, device in enumerate(["cpu", "meta"]):
        cache.layers[layer].lazy_initialization(*(torch.empty(1, 2, 0, 12, device=device) for _ in range(2)))
        assert {device.type for *_, device in recorder.made} == {device}
        recorder.made.clear()
        store = cache.layers[layer]._store
        store.reserve(8, 8)
        made = [device.type for shape, _, device in recorder.made if shape[0] == 8]
        assert len(made) >= 2  # keys and values
        assert set(made) == {device}
        recorder.made.clear()
    assert {str(device) for device in cache.pool.storage.devices} == {"cpu", "meta"}
    sizes = cache.pool.storage.block_bytes_by_device
    assert sizes.total() == cache.pool.storage.block_bytes
    assert len(set(sizes.values())) == 1  # two layers that are alike


# Sizes


def two_layers(free, monkeypatch, **sizes):
    """A cache whose layers lie on two devices with so much free memory."""
    monkeypatch.setattr(pool_memory, "free_memory", lambda device: parse_bytes(free[device.type]))
    cache = hfpaged.PagedCache(config=tiny_models.shared("llama").config, **sizes)
    for layer, device in enumerate(["cpu", "meta"]):
        cache.layers[layer].lazy_initialization(*(torch.empty(1, 2, 0, 12, device=device) for _ in range(2)))
    return cache.pool


BLOCK = 16 * 2 * 12 * 4 * 2  # bytes of 16 tokens in one layer: 2 heads of 12 floats, keys and values


@pytest.mark.parametrize(
    ("free", "blocks"), [({"cpu": BLOCK * 64, "meta": BLOCK * 20}, 10), ({"cpu": BLOCK * 16, "meta": BLOCK * 200}, 8)]
)
def test_the_device_that_holds_the_fewest_blocks_decides(free, blocks, monkeypatch):
    """Half of what is free, on each."""
    pool = two_layers(free, monkeypatch)
    assert pool.num_blocks == blocks
    assert not pool.is_sized_by_user


def test_memory_that_was_named_is_for_all_devices(monkeypatch):
    pool = two_layers({"cpu": 1, "meta": 1}, monkeypatch, memory=BLOCK * 20)
    assert pool.num_blocks == 10
    assert pool.is_sized_by_user


def test_a_device_without_room_is_named(monkeypatch):
    with pytest.raises(InvalidConfigError, match=r"on meta hold 0 blocks"):
        two_layers({"cpu": BLOCK * 64, "meta": BLOCK}, monkeypatch)


def on_each(free, total=10_000):
    parts = {torch.device(name): sizing.PoolSizing(total, 0.5, total - left, 100) for name, left in free.items()}
    return sizing.SpreadSizing(parts, {torch.device("cuda:0"): 50, torch.device("cuda:1"): 10})


def test_a_share_of_several_devices():
    spread = on_each({"cuda:0": 6100, "cuda:1": 5300})
    # Of 5000 - 3900 - 100 bytes there are 20 blocks of 50, of 5000 - 4700 - 100 there are 20 of 10.
    assert spread.pool == 20 * 60
    assert spread.activations == 200
    assert on_each({"cuda:0": 6100, "cuda:1": 5250}).pool == 15 * 60
    assert str(spread).startswith("cuda:0: 50% of 9.8 KiB, less")
    assert str(spread).count("20 blocks") == 2
    with pytest.raises(InvalidConfigError, match=r"cuda:1: .* nothing is left for a pool; .* or another device_map"):
        _ = on_each({"cuda:0": 6100, "cuda:1": 5000}).pool
