"""Reading a config.json: the sizes of well-known models, names on the hub, tensor parallelism, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hfpaged_kernels.encoding import Encoding
from planner_configs import KNOWN, llama

from hfpaged import kv_format as truth
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_storage import LayerStore
from hfpaged.planner import kv_formats
from hfpaged.planner.model_reading import facts_of, read_model
from hfpaged.planner.pool_layout import cross_bytes, dense_bytes, layout_of, why_no_window

LLAMA_2_7B = facts_of(llama(torch_dtype="float16", num_key_value_heads=32), "llama-2-7b")


@pytest.mark.parametrize("name", KNOWN)
def test_well_known_models_have_their_known_sizes(name):
    known = KNOWN[name]
    facts = facts_of(known.config, name)
    layout = layout_of(facts)
    assert dense_bytes(facts, 2) - dense_bytes(facts, 1) == known.token_bytes
    assert layout.windows == known.windows
    assert layout.state_bytes == known.states
    # With groups of equal layers, a block of each group together holds 16 tokens of all layers.
    if len({layer.kv_heads for layer in facts.layers if layer.kv_heads}) == 1:
        places = -(-sum(layer.kv_heads > 0 for layer in facts.layers) // len(layout.windows))
        layers = sum(layer.kv_heads > 0 for layer in facts.layers)
        assert layout.block_bytes * layers == 16 * known.token_bytes * places


def test_a_7b_model_takes_34_gb_for_32_sequences_of_2048_tokens():
    assert layout_of(LLAMA_2_7B).sequence_bytes(2048) * 32 == 34_359_738_368
    assert dense_bytes(LLAMA_2_7B, 2048) * 32 == 34_359_738_368
    grouped = facts_of(llama(), "llama-3-8b")
    assert layout_of(grouped).block_bytes * 4 == layout_of(LLAMA_2_7B).block_bytes


def test_whisper_keeps_what_its_encoder_read_beside_the_pool():
    config = {"model_type": "whisper", "torch_dtype": "float16", "is_encoder_decoder": True, "d_model": 1280}
    config |= {"decoder_layers": 32, "encoder_layers": 24, "decoder_attention_heads": 20, "encoder_attention_heads": 16}
    facts = facts_of(config, "whisper-large")
    assert cross_bytes(facts, 1500) == 2 * 32 * 1280 * 2 * 1500
    assert layout_of(facts).block_bytes == 16 * 2 * 32 * 1280 * 2


SHAPES = [(1, 64, 64), (2, 12, 12), (3, 192, 128), (1, 512, 64), (2, 80, 80), (4, 96, 128), (2, 6, 10)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formats_take_the_bytes_that_they_really_take(shape, block_size):
    """The table without torch against stores of torch's tensors: all names, and all pairs of keys and values."""
    heads, key_dim, value_dim = shape
    pairs = [f"{key}/{value}" for key in truth._KEYS for value in truth._VALUES]
    key, value = (torch.empty(1, heads, 1, dim, dtype=torch.bfloat16) for dim in (key_dim, value_dim))
    for name in [*truth.FORMATS, *pairs]:
        ours, real = kv_formats.plan_format(name), truth.resolve_format(name)
        store = LayerStore(key, value, block_size, real)
        assert ours.block_bytes(heads, key_dim, value_dim, block_size, "bfloat16") == store.block_bytes, name
        assert ours.residual_bytes(heads, key_dim, value_dim, block_size, "bfloat16") == store.residual_bytes, name


def test_the_table_of_formats_has_all_names_and_dtypes():
    assert list(kv_formats.FORMATS) == list(truth.FORMATS)
    assert all(getattr(torch, name).itemsize == size for name, size in kv_formats.DTYPE_BYTES.items())
    encodings = [part for part in truth._KEYS.values() if isinstance(part, Encoding)]
    assert len(encodings) == sum(part.bits > 0 for part in kv_formats._KEYS.values())


@pytest.mark.parametrize("kv_format", ["int4", "k8v4", "int8/int4"])
def test_odd_heads_are_refused_as_by_the_cache(kv_format):
    odd = facts_of(llama(head_dim=27), "odd")
    with pytest.raises(InvalidConfigError, match="head dim 27, which is odd"):
        layout_of(odd, kv_format)
    with pytest.raises(InvalidConfigError, match="head dim 27, which is odd"):
        truth.check_dims(truth.resolve_format(kv_format), 27, 27)


def test_unknown_formats_and_dtypes_are_refused_with_the_names_that_exist():
    with pytest.raises(InvalidConfigError, match="'int3' is not known; use one of auto"):
        layout_of(LLAMA_2_7B, "int3")
    with pytest.raises(InvalidConfigError, match="'float12' is not known; use one of float64"):
        layout_of(LLAMA_2_7B, dtype="float12")
    with pytest.raises(InvalidConfigError, match="block_size=24 is not a power of two"):
        layout_of(LLAMA_2_7B, block_size=24)


def test_kv_heads_are_divided_among_ranks_and_whole_on_each_where_they_do_not_divide():
    """As hfpaged.tensor_parallel.load_model does: see test_plan_ranks.py for real ones."""
    facts = facts_of(llama(), "llama-3-8b")
    whole = layout_of(facts).block_bytes
    assert [whole // layout_of(facts, tp=tp).block_bytes for tp in (1, 2, 4, 8, 16, 32)] == [1, 2, 4, 8, 1, 1]
    assert dense_bytes(facts, 100, tp=16) == dense_bytes(facts, 100) == 8 * dense_bytes(facts, 100, tp=8)
    latent = facts_of(KNOWN["deepseek-ai/DeepSeek-V3"].config, "deepseek")
    assert layout_of(latent, tp=8).block_bytes == layout_of(latent).block_bytes
    assert layout_of(facts, tp=3) == layout_of(facts)
    with pytest.raises(InvalidConfigError, match="tp=0 is no number of ranks"):
        layout_of(facts, tp=0)
    with pytest.raises(InvalidConfigError, match="no tp_plan for models of type 'gpt2'"):
        layout_of(facts_of({"model_type": "gpt2"}, "gpt2"), tp=2)


def test_a_latent_says_its_width():
    facts = facts_of(KNOWN["deepseek-ai/DeepSeek-V3"].config, "deepseek")
    assert {layer.latent_dim for layer in facts.layers} == {576}
    assert "dense view" in why_no_window(facts)


def test_a_window_bounds_what_a_sequence_holds():
    layout = layout_of(LLAMA_2_7B, window=1024)
    assert layout.blocks(600) == layout_of(LLAMA_2_7B).blocks(600)
    assert layout.blocks(10_000) == layout.blocks(100_000) == 1 + (1024 + 256) // 16 + 1
    mistral = facts_of(KNOWN["mistralai/Mistral-7B-v0.1"].config, "mistral")
    assert layout_of(mistral, window=8192).windows == (4096,)
    jamba = facts_of(KNOWN["ai21labs/Jamba-v0.1"].config, "jamba")
    with pytest.raises(InvalidConfigError, match="cannot stream with window=64: some of its layers keep a state"):
        layout_of(jamba, window=64)


def test_an_unknown_type_is_read_by_the_usual_fields_and_says_so():
    facts = facts_of(llama(model_type="llama99"), "new")
    assert len(facts.layers) == 32
    assert "'llama99' is not known to plan" in facts.notes[0]
    assert "num_key_value_heads = 8" in facts.notes[0]
    assert facts_of(llama(), "known").notes == ()


def test_an_unknown_type_without_the_usual_fields_is_refused_with_what_was_looked_for():
    with pytest.raises(InvalidConfigError) as caught:
        facts_of({"model_type": "martian", "width": 12}, "x")
    said = str(caught.value)
    assert "'martian'" in said
    assert all(name in said for name in ("num_hidden_layers", "n_layer", "num_attention_heads", "n_head"))


def test_layers_that_plan_does_not_know_are_refused_not_guessed():
    types = ["linear_attention", "full_attention"] * 16
    with pytest.raises(InvalidConfigError, match=r"'new'.*'linear_attention'"):
        facts_of(llama(model_type="new", layer_types=types), "x")
    with pytest.raises(InvalidConfigError, match=r"'llama'.*'telepathic_attention'"):
        facts_of(llama(layer_types=["telepathic_attention"] * 32), "x")
    with pytest.raises(InvalidConfigError, match="no window for it; plan looked for sliding_window"):
        facts_of(llama(layer_types=["sliding_attention"] * 32), "x")


@pytest.mark.parametrize("value", [0, -1, "many", 2.5, True])
def test_a_field_that_is_no_count_is_named(value):
    with pytest.raises(InvalidConfigError, match=r"num_hidden_layers=.*whole number of at least 1"):
        facts_of(llama(num_hidden_layers=value), "x")


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_model_is_a_folder_a_file_or_a_name_in_the_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshots = tmp_path / "hub" / "models--org--model" / "snapshots"
    write(snapshots / "old", llama(num_hidden_layers=7))
    write(snapshots / "main", llama(num_hidden_layers=5))
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("main")
    assert len(read_model("org/model").layers) == 5
    assert read_model("org/model").folder == str(snapshots / "main")
    for name in (snapshots / "old", snapshots / "old" / "config.json"):
        assert len(read_model(str(name)).layers) == 7
    (snapshots.parent / "refs" / "main").unlink()
    assert len(read_model("org/model").layers) in (5, 7)


def test_the_hub_cache_is_where_huggingface_hub_has_it(monkeypatch, tmp_path):
    from hfpaged.planner.config_file import hub_cache

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ((None, ""), ("XDG_CACHE_HOME", "x"), ("HF_HOME", "y"), ("HF_HUB_CACHE", "z")):
        if name:
            monkeypatch.setenv(name, str(tmp_path / value))
        code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert str(hub_cache()) == done.stdout.strip()


WRONG = [
    ("./nowhere/config.json", "there is no file"),
    ("org/of/nobody", "there is no file"),
    ("nobody/has-this", "HF_HUB_OFFLINE forbids to download it; unset it, or give a folder"),
    ("llama", "'llama' is a model type, of which there are models of many sizes"),
]


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_a_model_that_is_not_there_is_refused_with_the_remedy(name, words, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidConfigError, match=words):
        read_model(name)


def test_without_network_the_download_says_why(monkeypatch, tmp_path):
    import huggingface_hub

    def fails(*args):
        raise OSError("no route to host\nand more")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(InvalidConfigError, match=r"gave none \(no route to host\); give a folder"):
        read_model("nobody/has-this")


@pytest.mark.parametrize("text", ["", "[1]", "{", '"text"'])
def test_a_file_that_is_no_config_is_refused(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=r"config\.json (cannot be read as JSON|holds no JSON object)"):
        read_model(str(path))
    with pytest.raises(InvalidConfigError, match=r"has no config\.json"):
        read_model(str(tmp_path.parent))


def test_reading_a_config_imports_neither_torch_nor_transformers(tmp_path):
    write(tmp_path, llama())
    code = (
        "import sys\nfrom hfpaged.planner.model_reading import read_model\n"
        "from hfpaged.planner.pool_layout import layout_of\n"
        f"layout_of(read_model({str(tmp_path)!r}), 'int4', tp=2)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'numba', 'huggingface_hub', 'hfpaged_kernels'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
