"""The command line of the judge, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from quality_model import POSITIONS, byte_tokenizer, small_llama

import hfpaged
from hfpaged import cli, demo_model, patching
from hfpaged.cache import PagedCache
from hfpaged.kv_scales import KVScales

SMALL = ["--contexts", "40", "--texts", "3"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    small_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bad_bfloat16(monkeypatch):
    """Caches in bfloat16 that store other values than they were given."""
    update = PagedCache.update

    def negated(self, key, value, *args, **kwargs):
        sign = -1 if self.pool.kv_format.name == "bfloat16" else 1
        return update(self, key, sign * value, *args, **kwargs)

    monkeypatch.setattr(PagedCache, "update", negated)


def run(*words):
    return cli.main(["quality", *words])


def test_a_fit_format_exits_0_and_everything_is_written(tiny, tmp_path, capsys):
    json_file, plot_file = tmp_path / "figures.json", tmp_path / "kl.png"
    files = ["--json", str(json_file), "--plot", str(plot_file)]
    assert run(tiny, "--kv", "bfloat16", "--against", "auto", *SMALL, *files) == 0
    found = json.loads(json_file.read_text())
    assert {"model", "parameters", "dtype", "device", "threads", "kernels", "torch", "data"} <= set(found["header"])
    assert [(one["format"], one["context"]["name"], one["scored"]) for one in found["figures"]] == [
        ("bfloat16", "40", 117),
        ("auto", "40", 117),
    ]
    half, native = found["figures"]
    assert (half["of_native"], half["of_bfloat16"], native["of_bfloat16"]) == (0.5, 1.0, 2.0)
    assert 0 < half["kl_mean"] < half["kl_p99"] < 0.02
    assert len(half["kl_by_position"]) == 39
    assert (native["kl_mean"], native["kl_p99"], native["ppl_change"], native["top1"]) == (0, 0, 0, 1)
    assert (native["parts_at"], native["rouge_l"], native["generated"]) == (None, 1, 20)
    assert plot_file.read_bytes()[:4] == b"\x89PNG"
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == found["verdict"]
    assert found["verdict"].startswith("bfloat16 is fit for this model: perplexity ")
    assert "40: 3 texts of 40 tokens, 39 of each fed one by one: 117 scored" in captured.out
    assert "hfpaged: 40: 3 texts of 40 tokens" in captured.err


@pytest.mark.usefixtures("bad_bfloat16")
def test_a_bad_format_exits_3_and_is_named_with_its_numbers(tiny, capsys):
    assert run("--model", tiny, "--kv", "float16", "--against", "bfloat16", *SMALL) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    good, bad = last.split("; ")
    assert good.startswith("float16 is fit for this model")
    assert bad.startswith("bfloat16 is not fit for this model: ")
    assert "KL" in bad
    assert "top-1" in bad


def test_thresholds_decide(tiny):
    assert run(tiny, "--kv", "bfloat16", *SMALL, "--max-kl", "0") == 3
    assert run(tiny, "--kv", "auto", *SMALL, "--max-kl", "0", "--max-ppl-change", "0%", "--min-top1", "100%") == 0


def test_a_gate_fails_over_the_limits_that_it_names_and_says_by_how_much(tiny, capsys):
    assert run(tiny, "--kv", "bfloat16", *SMALL, "--fail-over", "ppl=50%,kl=0,top1=0%", "--json", "-") == 3
    found = json.loads(capsys.readouterr().out)
    (failure,) = found["failures"]
    assert (failure["format"], failure["context"], failure["name"], failure["limit"]) == ("bfloat16", "40", "kl", 0)
    assert failure["by"] == failure["value"] == found["figures"][0]["kl_mean"]
    assert found["verdict"].startswith(f"bfloat16 is not fit for this model: KL {failure['value']:.2g} is above 0 by ")
    assert run(tiny, "--kv", "bfloat16", *SMALL, "--fail-over", "top1=0%") == 0  # whatever KL is


def test_the_quick_gate_takes_fewer_texts_and_what_is_given_stands_above_it(tiny, capsys):
    assert run(tiny, "--kv", "auto", "--quick") == 0
    assert f"short: 4 texts of {POSITIONS} tokens" in capsys.readouterr().out
    assert run(tiny, "--kv", "auto", "--quick", *SMALL) == 0
    assert "40: 3 texts of 40 tokens" in capsys.readouterr().out


def test_limits_come_in_one_way_or_the_other(tiny, capsys):
    assert run(tiny, "--fail-over", "kl=1", "--min-top1", "98%") == 2
    assert "--fail-over holds all limits, and --min-top1 is one more" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        run(tiny, "--fail-over", "top1=98")
    assert stopped.value.code == 2
    assert "98 could be 98% or 9800%" in capsys.readouterr().err


def test_lengths_above_the_models_are_cut_and_said(tiny, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert run(tiny, "--kv", "auto", "--contexts", "short,max", "--texts", "2", "--json", str(path)) == 0
    (one,) = json.loads(path.read_text())["figures"]  # both come out alike
    note = f"cut from 128 to {POSITIONS} tokens, the model's most"
    assert one["context"] == {"name": "short", "length": POSITIONS, "note": note}
    assert note in capsys.readouterr().out


def test_own_data_are_used(tiny, tmp_path, capsys):
    data = tmp_path / "own.txt"
    data.write_text("Own text, in which there is nothing but the same few words. " * 3)
    assert run(tiny, "--kv", "auto", "--data", str(data), "--contexts", "40") == 0
    out = capsys.readouterr().out
    assert f"{data}, 180 tokens" in out
    assert "40: 4 texts" in out  # no more than do not overlap
    assert run(tiny, "--kv", "auto", "--data", str(data), "--contexts", "90") == 0


def test_the_model_is_left_as_it_was(tiny, monkeypatch):
    model, tokenizer = demo_model.load(tiny)
    monkeypatch.setattr(demo_model, "load", lambda *_, **__: (model, tokenizer))
    assert run("--kv", "bfloat16", *SMALL) == 0
    assert not patching.is_patched(model)
    monkeypatch.setattr(PagedCache, "update", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--kv", "bfloat16", *SMALL)
    assert not patching.is_patched(model)


def test_targets_are_shown_for_the_demo_model_alone(tiny, monkeypatch, capsys):
    assert run(tiny, "--kv", "auto", *SMALL) == 0
    assert "target" not in capsys.readouterr().out
    loaded = demo_model.load(tiny)
    monkeypatch.setattr(demo_model, "load", lambda *_, **__: loaded)
    monkeypatch.setitem(hfpaged.quality.verdict.DEMO_TARGETS, "auto", hfpaged.quality.thresholds.Target(0.5, 0.1, 0.9))
    assert run("--kv", "auto", *SMALL) == 0
    assert "50 %, +10.00 %, 90 %: MISSED bytes" in capsys.readouterr().out


@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_e5m2"])
def test_calibrating_writes_the_largest_keys_and_values_of_each_head(tiny, tmp_path, capsys, kv):
    path = tmp_path / "scales.safetensors"
    assert run(tiny, "--calibrate", str(path), "--kv", kv, *SMALL) == 0
    assert "static scales of " + kv in capsys.readouterr().out.splitlines()[-1]
    found = KVScales.load(path)
    assert (found.kv_format, list(found.layers)) == (kv, [0, 1])
    model, tokenizer = demo_model.load(tiny)
    found.check_model(hfpaged.fingerprint.model_keys(model)[0].value)
    texts = hfpaged.quality.corpus.load_corpus(None, tokenizer).texts(hfpaged.quality.contexts.Context("40", 40), 3)
    with torch.inference_mode():
        cache = model(input_ids=texts).past_key_values
    for layer, amax in found.layers.items():
        expected = cache.layers[layer]
        assert torch.allclose(amax.key, expected.keys.abs().amax(dim=(0, 2, 3)), rtol=1e-5)
        assert torch.allclose(amax.value, expected.values.abs().amax(dim=(0, 2, 3)), rtol=1e-5)


def test_static_scales_are_judged_beside_those_of_each_token(tiny, tmp_path, capsys):
    path = tmp_path / "scales.safetensors"
    assert run(tiny, "--calibrate", str(path), *SMALL) == 0
    capsys.readouterr()
    loose = ["--max-kl", "9", "--max-ppl-change", "99%", "--min-top1", "0%"]
    assert run(tiny, "--kv", "fp8_e4m3", "--against", "fp8_e4m3", "--kv-scales", str(path), *SMALL, *loose) == 0
    static, dynamic = capsys.readouterr().out.splitlines()[-1].split("; ")
    assert static.startswith("fp8_e4m3 static is fit")
    assert dynamic.startswith("fp8_e4m3 is fit")
    assert static.split("fit")[1] != dynamic.split("fit")[1]
    assert run(tiny, "--kv", "int8", "--kv-scales", str(path), *SMALL) == 2
    assert "kv_scales= are for fp8_e4m3" in capsys.readouterr().err
    assert run(tiny, "--kv", "fp8_e4m3", "--kv-scales", str(tmp_path / "none"), *SMALL) == 2
    assert "give a file of --calibrate" in capsys.readouterr().err


def test_layers_and_heads_are_ranked_and_what_exempts_them_is_kv_dtype(tiny, tmp_path, capsys):
    path = tmp_path / "figures.json"
    loose = ["--max-kl", "9", "--max-ppl-change", "99%", "--min-top1", "0%"]
    assert run(tiny, "--kv", "int4", "--layers", *SMALL, *loose, "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert sorted(one["layer"] for one in found["layers"]) == [0, 1]
    assert found["layers"][0]["kl_mean"] >= found["layers"][1]["kl_mean"] > 0
    assert {(one["layer"], one["head"]) for one in found["heads"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(0.01 < max(one["key_error"], one["value_error"]) < 0.5 for one in found["heads"])
    assert found["exempting"] == {"default": "int4", "layers": {"0": "auto", "1": "auto"}}
    assert "kv_dtype={'default': 'int4', 'layers': {0: 'auto', 1: 'auto'}}" in capsys.readouterr().out
    assert run(tiny, "--kv", json.dumps(found["exempting"]), *SMALL, "--max-kl", "0", "--min-top1", "100%") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv", "int3"], "'int3' is not known; use one of auto"),
        (["--kv", "auto", "--against", "auto,none"], "'none' is not known"),
        (["--kv", "auto", "--contexts", "huge"], "--contexts huge: a length is one of short"),
        (["--kv", "auto", "--texts", "0"], "--texts 0 measures nothing"),
        (["--kv", "auto", "--threads", "0"], "--threads 0 measures nothing"),
        (["--kv", "auto", "--json", "no/such/folder/figures.json"], "its folder does not exist"),
        (["--kv", "auto", "--plot", "kl.svg"], "only PNG is drawn"),
        (["--kv", "auto", "--model", "./no-such-folder"], "there is no such folder"),
        (["--kv", "auto", "--model", "a", "b"], "both name a model"),
        (["--kv", "int4", "--calibrate", "x"], "int4 has no static scales; use --kv fp8_e4m3 or fp8_e5m2"),
    ],
)
def test_a_wrong_option_is_one_line_and_exits_2(words, message, capsys):
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_data_that_are_too_short_or_not_there_are_one_line_and_exit_2(tiny, tmp_path, capsys):
    data = tmp_path / "own.txt"
    data.write_text("short")
    assert run(tiny, "--kv", "auto", "--data", str(data), "--contexts", "40") == 2
    assert "the data have 5 tokens, and context 40 needs 41" in capsys.readouterr().err
    assert run(tiny, "--kv", "auto", "--data", str(tmp_path / "none.txt")) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--min-top1", "0.93"], ["--max-ppl-change", "1"]])
def test_a_threshold_without_its_sign_exits_2_with_usage(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*words)
    assert "write a percentage with its sign" in capsys.readouterr().err


def test_help_says_the_defaults_and_imports_no_torch():
    code = (
        "import sys; from hfpaged import cli\n"
        "try: cli.main(['quality', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'rich', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "default: short,1k" in told
    assert "(default: 1%, as MLPerf asks of quantized models 99% of their quality)" in told
    assert "examples:" in told
    assert "exit codes: 0 when all formats are fit, 3" in told
