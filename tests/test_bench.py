"""The command line of the benchmark, run quickly on a tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfpaged
from hfpaged import cli, patching
from hfpaged.attention import paged_attention
from hfpaged.bench import runner
from hfpaged.bench.catalog import ROWS, choose
from hfpaged.bench.python_time import instrumented
from hfpaged.bench.setting import Setting
from hfpaged.cache import PagedCache
from hfpaged.compat import ALL_ATTENTION_FUNCTIONS, ATTENTION_NAME, cache_argument

COMMAND = ["bench", "generate", "--quick"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a random llama and no tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def wrong_cache(monkeypatch):
    """A PagedCache that stores other values than it was given."""
    update = PagedCache.update

    def negated(self, key, value, *args, **kwargs):
        return update(self, key, -value, *args, **kwargs)

    monkeypatch.setattr(PagedCache, "update", negated)


def test_every_row_is_measured_and_written_as_json(tiny, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert cli.main([*COMMAND, "--model", tiny, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    told = {"header", "tokens_agree", "verdict", "exit_code", "rows", "interrupted", "rows_planned", "comparison"}
    assert set(figures) == told
    assert {"kind", "model", "parameters", "dtype", "device", "cpu", "threads", "kernels"} <= set(figures["header"])
    assert {"torch", "transformers", "hfpaged", "repeats", "quick"} <= set(figures["header"])
    assert [row["name"] for row in figures["rows"]] == [row.name for row in choose(None, ROWS)]
    assert all(row["value"] >= 0 and row["met"] is None for row in figures["rows"])
    assert [row["name"] for row in figures["rows"] if row["same_tokens"] is None] == ["waste", "bandwidth", "python"]
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == figures["verdict"]
    assert "hfpaged: tokens (1 of 9)" in captured.err


def test_a_prompt_too_long_for_the_model_is_cut_and_the_row_says_so(tiny, tmp_path):
    path = tmp_path / "figures.json"
    assert cli.main([*COMMAND, "--model", tiny, "--only", "decode-long", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["shape"] == {"batch": 1, "prompt": 32, "new": 8, "own": 0}
    assert row["note"] == "prompt cut from 64 to 32 tokens, the model's most"


@pytest.mark.usefixtures("wrong_cache")
def test_a_wrong_cache_exits_1_and_earns_no_ratio(tiny, tmp_path, capsys):
    path = tmp_path / "figures.json"
    only = "tokens,decode-short,beam-memory,waste"
    assert cli.main([*COMMAND, "--model", tiny, "--only", only, "--json", str(path)]) == 1
    tokens, *others = json.loads(path.read_text())["rows"]
    assert tokens["value"] < 1
    assert all(row[name] is None for row in others for name in ("value", "plain", "paged", "met"))
    out = capsys.readouterr().out
    assert "tokens differ" in out
    assert "tok/s" not in out
    assert out.splitlines()[-1].endswith("so speed and memory are not compared.")


def test_the_model_and_its_registry_are_left_as_they_were(tiny):
    model = LlamaForCausalLM.from_pretrained(tiny)
    before = PagedCache.update
    runner.measure(Setting(model, None, 1, True), [row for row in ROWS if row.name == "python"], [])
    assert not patching.is_patched(model)
    assert PagedCache.update is before
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is paged_attention


def test_instrumenting_times_the_cache_and_inside_of_it_the_kernels(tiny):
    model = LlamaForCausalLM.from_pretrained(tiny).eval()
    with instrumented(model) as (outer, inner), torch.inference_mode():
        cache = hfpaged.PagedCache(model)
        model(input_ids=torch.tensor([[5, 6, 7]]), **{cache_argument(): cache})
    layers = model.config.num_hidden_layers
    assert inner.calls == layers  # write_kv; a first prefill needs no kernel to read
    assert outer.calls == 2 * layers + 3  # update and attention, one mask, two hooks
    assert 0 < inner.seconds < outer.seconds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "tokens,speed"], "there is no such row; the rows are tokens, decode-short"),
        (["--repeats", "0"], "--repeats 0 measures nothing"),
        (["--threads", "0"], "--threads 0 measures nothing"),
        (["--json", "no/such/folder/figures.json"], "its folder does not exist"),
        (["--model", "./no-such-folder"], "there is no such folder"),
    ],
)
def test_a_wrong_option_is_one_line_and_exits_2(words, message, capsys):
    assert cli.main([*COMMAND, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_help_lists_the_rows_with_their_targets(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "generate", "--help"])
    out = capsys.readouterr().out
    assert "decode-long   decode speed, batch 1, prompt 6000, target >= 1.6x" in out
    assert "target <= 45 %\n" in out
