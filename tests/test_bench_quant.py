"""`hfpaged bench quant`, run quickly on a tiny model beside a made-up rival: no times, and no optional library."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from quality_model import byte_tokenizer, small_llama
from transformers import DynamicCache, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, cache_utils

import hfpaged
from hfpaged import cli
from hfpaged.bench import quant_bytes, quant_perplexity, quant_speed, rivals, stored_prompts
from hfpaged.bench.quant_rows import QUANT_ROWS
from hfpaged.bench.result import Measured, Outcome
from hfpaged.bench.rivals import HQQ_4, HQQ_8, QUANTO_4, Rival, obstacle, tensor_bytes
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import in_format
from hfpaged.bench.stored_prompts import fill, prompt_states
from hfpaged.compat import cache_argument
from hfpaged.quality.metrics import log_probs

COMMAND = ["bench", "quant", "--quick"]
ROW = {row.name: row for row in QUANT_ROWS}
NEEDS_NO_LIBRARY = ["int8-decode", "fp8_e4m3-decode", "k8v4-decode", "int4-decode"]
SHAPE = Shape(2, 40, 6)


class HalfCache(DynamicCache):
    """A rival that stores bfloat16, so roughly that it shows: 4 bits of what the model computes."""

    def __init__(self, backend, config, **options):
        super().__init__(config=config)
        self.options = options

    def update(self, key, value, *args, **kwargs):
        return super().update(rounded(key), rounded(value), *args, **kwargs)


def rounded(states):
    return (states * 4).round() / 4


@pytest.fixture
def halves(monkeypatch):
    """QuantizedCache is HalfCache, and both libraries seem to be there."""
    monkeypatch.setattr(rivals, "QuantizedCache", HalfCache)
    monkeypatch.setattr(rivals, "_is_installed", lambda module: True)


@pytest.fixture
def nothing_installed(monkeypatch):
    find = rivals.importlib.util.find_spec

    def without(name, *args):
        if name.startswith("optimum"):
            raise ModuleNotFoundError(name)  # as Python does for a part of a package that is not there
        return None if name == "hqq" else find(name, *args)

    monkeypatch.setattr(rivals.importlib.util, "find_spec", without)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    small_llama(max_position_embeddings=160).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def setting(folder):
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        yield Setting(model, byte_tokenizer(), 1, True)
    stored_prompts.prompt_states.cache_clear()


def run(folder, tmp_path, *words):
    path = tmp_path / "figures.json"
    code = cli.main([*COMMAND, folder, "--json", str(path), *words])
    return code, json.loads(path.read_text())


@pytest.mark.usefixtures("halves")
def test_every_row_is_measured_and_none_compares_tokens(folder, tmp_path, capsys):
    code, figures = run(folder, tmp_path)
    assert code == 0
    assert [row["name"] for row in figures["rows"]] == list(ROW)
    assert all(row["same_tokens"] is None and row["met"] is None for row in figures["rows"])
    assert all(row["value"] > (-1 if "ppl" in row["name"] else 0) for row in figures["rows"])
    assert "hfpaged: int8-decode (1 of 13)" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_installed")
def test_a_row_whose_library_is_missing_says_what_to_install_and_has_no_ratio(folder, tmp_path, capsys):
    code, figures = run(folder, tmp_path, "--strict")
    assert code == 0
    rows = {row["name"]: row for row in figures["rows"]}
    assert [name for name, row in rows.items() if row["value"] is not None] == NEEDS_NO_LIBRARY
    told = {name.split("-")[-1]: row["note"] for name, row in rows.items() if row["value"] is None}
    assert told["hqq"].startswith("not measured: pip install hqq")
    assert told["quanto"].startswith("not measured: pip install optimum-quanto")
    assert all(row["plain"] is None and row["paged"] is None for row in rows.values() if row["value"] is None)
    assert "optimum-quanto" in capsys.readouterr().out


@pytest.mark.usefixtures("halves")
def test_a_library_that_fails_is_quoted(setting, monkeypatch):
    def update(*args, **kwargs):
        raise RuntimeError("no compiler here\nmore lines")

    monkeypatch.setattr(HalfCache, "update", update)
    measured = quant_speed.int4_quanto(setting, SHAPE)
    assert measured == Measured(None, note="not measured: quanto axis 0 fails: no compiler here")


@pytest.mark.usefixtures("halves")
def test_what_is_fed_is_the_same_on_both_sides_whatever_they_say(setting, monkeypatch):
    fed = []
    forward = quant_speed.forward

    def noted(model, ids, cache):
        is_ours = isinstance(cache, hfpaged.PagedCache)
        assert hfpaged.patching.is_patched(model) == is_ours
        fed.append((is_ours, cache.get_seq_length(), ids.flatten().tolist()))
        return forward(model, ids, cache)

    monkeypatch.setattr(quant_speed, "forward", noted)
    measured = quant_speed.int4_hqq(setting, SHAPE)
    ours, theirs = ([step[1:] for step in fed if step[0] is is_ours] for is_ours in (True, False))
    assert ours == theirs
    assert [length for length, _ in ours] == list(range(40, 40 + SHAPE.new))
    assert measured.value == measured.paged / measured.plain


def test_stored_prompts_are_what_a_forward_would_have_stored(setting):
    states = prompt_states(setting, 2, 40)
    ids = stored_prompts.random_ids(setting, 2, 40)
    following = torch.tensor([[5], [6]])
    side = in_format("int8")
    side.switch(setting.model)
    given, computed = side.make_cache(setting.model), side.make_cache(setting.model)
    fill(given, states)
    setting.model(input_ids=ids, **{cache_argument(): computed})
    said = [setting.model(input_ids=following, **{cache_argument(): cache}).logits for cache in (given, computed)]
    assert torch.allclose(said[0], said[1], atol=1e-3)
    assert given.get_seq_length() == computed.get_seq_length() == 41


@pytest.mark.usefixtures("halves")
def test_perplexity_against_a_rival_is_that_of_plain_transformers_with_its_cache(setting):
    shape = Shape(2, 40, 12)
    measured = quant_perplexity.int4_hqq(setting, shape)
    texts = quant_perplexity._texts(setting, shape)
    assert texts.shape == (2, 53)
    hfpaged.unpatch(setting.model)
    cache = HalfCache("hqq", setting.model.config)
    setting.model(input_ids=texts[:, :40], **{cache_argument(): cache})
    nll = []
    for position in range(40, 52):
        said = log_probs(setting.model(input_ids=texts[:, position : position + 1], **{cache_argument(): cache}).logits)
        nll.append(-said[:, -1].gather(-1, texts[:, position + 1 : position + 2]))
    assert measured.plain == pytest.approx(float(torch.cat(nll).mean().exp()), rel=1e-4)
    assert measured.value == pytest.approx(measured.paged / measured.plain - 1)
    for name in ("int4 ", "hqq axis 1 ", "hqq axis 0 ", "hqq axis 1 residual 16 "):
        assert name in measured.note


def test_layers_with_windows_are_filled_from_the_first_token(setting):
    torch.manual_seed(0)
    windows = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["full_attention", "sliding_attention"],
        sliding_window=16, use_sliding_window=True,
    )).eval()  # fmt: skip
    other = replace(setting, model=windows, tokenizer=None)
    assert {states.key.shape[2] for states in prompt_states(other, 2, 40).values()} == {40}
    assert quant_speed.int8(other, SHAPE).value > 0
    assert quant_speed.int4_quanto(other, SHAPE).note.startswith("not measured: ")  # QuantizedCache refuses windows


def test_perplexity_needs_a_tokenizer(setting):
    measured = quant_perplexity.int8_hqq(replace(setting, tokenizer=None), SHAPE)
    assert measured.value is None
    assert measured.note.startswith("not measured: ")


@pytest.mark.usefixtures("halves")
def test_bytes_are_those_of_the_tensors_at_the_end_of_the_context(setting):
    shape = Shape(2, 32, 16)
    measured = quant_bytes.int8_hqq(setting, shape)
    config = setting.model.config
    numbers = 2 * 48 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert round(measured.plain * 1e6) == 4 * numbers
    scales = numbers // config.head_dim
    assert numbers + scales < measured.paged * 1e6 < numbers + 5 * scales
    assert measured.value == pytest.approx(measured.paged / measured.plain)


def test_tensors_made_of_tensors_count_what_they_are_made_of():
    class Made(torch.Tensor):
        def __tensor_flatten__(self):
            return ["codes", "scale"], None

    made = torch.empty(64).as_subclass(Made)
    made.codes, made.scale = torch.zeros(32, dtype=torch.uint8), torch.zeros(2)
    assert tensor_bytes([made, {"zero": torch.zeros(3)}, (torch.zeros(2, dtype=torch.int8), 7, "text")]) == 40 + 12 + 2


@pytest.mark.parametrize("rival", [HQQ_4, HQQ_8, QUANTO_4], ids=lambda rival: f"{rival.backend}{rival.bits}")
def test_a_rival_passes_on_what_makes_it(setting, monkeypatch, rival):
    made = []
    monkeypatch.setattr(rivals, "QuantizedCache", lambda *args, **options: made.append((args, options)))
    for one in (rival, rival.on_default_axis, rival.with_residual(16)):
        one.make_cache(setting.model)
    axes = {"hqq": (1, 0, 1), "quanto": (0, 0, 0)}[rival.backend]
    assert [options["axis_key"] for _, options in made] == [options["axis_value"] for _, options in made] == list(axes)
    assert all(args == (rival.backend, setting.model.config) for args, _ in made)
    assert all(options["nbits"] == rival.bits for _, options in made)
    assert [options.get("residual_length") for _, options in made] == [None, None, 16]


@pytest.mark.parametrize("rival", [HQQ_4, HQQ_8, QUANTO_4], ids=lambda rival: f"{rival.backend}{rival.bits}")
def test_a_real_library_is_really_quantized(setting, rival):
    if rival.backend == "quanto":
        pytest.importorskip("optimum.quanto")
    else:
        pytest.importorskip("hqq")
    shape = Shape(1, 64, 4)
    assert obstacle(rival, setting, shape) is None
    cache = rival.make_cache(setting.model)
    states = prompt_states(setting, 1, 64)
    fill(cache, states)
    native = sum(key.nbytes + value.nbytes for key, value in states.values())
    assert rival.side.kv_bytes(cache) < native / 2
    assert isinstance(cache, cache_utils.QuantizedCache)


@pytest.mark.parametrize(
    ("name", "target", "good", "bad"),
    [
        ("int8-decode", ">= 1x", 1.0, 0.99),
        ("int4-quanto", ">= 1.3x", 1.3, 1.29),
        ("int8-ppl-hqq", "< 0 %", -0.0001, 0.0),
    ],
)
def test_targets(name, target, good, bad):
    row = ROW[name]
    assert str(row.target) == target
    assert Outcome(row, row.shape, Measured(good)).is_met is True
    assert Outcome(row, row.shape, Measured(bad)).is_met is False


def test_strict_exits_3_for_a_missed_target(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(quant_speed, "int8", lambda setting, shape: Measured(0.5))
    path = tmp_path / "figures.json"
    words = ["bench", "quant", folder, "--only", "int8-decode", "--json", str(path)]
    assert cli.main(words) == 0
    assert cli.main([*words, "--strict"]) == 3
    assert "1 targets met, missed: int8-decode" in json.loads(path.read_text())["verdict"]


def test_help_lists_the_rows_and_two_models_are_one_too_many(folder, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "quant", "--help"])
    out = capsys.readouterr().out
    assert "int8-decode       int8 over native, decode speed, batch 16, prompt 1024, 64 steps, target >= 1x\n" in out
    assert "int4-bytes-quanto int4 and quanto, KV bytes, batch 8, prompt 512, 64 new, for information\n" in out
    assert cli.main([*COMMAND, folder, "--model", folder]) == 2
    assert "both name a model; give one" in capsys.readouterr().err


def test_the_names_of_rows_lead_to_functions():
    assert all(callable(row.load()) for row in QUANT_ROWS)
    assert isinstance(HQQ_4, Rival)
