"""What all kinds of `hfpaged bench` have in common: plots, comparisons with an earlier run, and how they end."""

from __future__ import annotations

import importlib
import json

import pytest
import tiny_models

from hfpaged import cli
from hfpaged.bench import plot
from hfpaged.bench.catalog import ROWS, choose
from hfpaged.bench.conclusion import Conclusion
from hfpaged.bench.kinds import KINDS
from hfpaged.bench.result import Measured, Outcome
from hfpaged.errors import InvalidConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["bench", "generate", "--quick", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make("llama").save_pretrained(path)
    return str(path)


def fail_with(monkeypatch, error, module="bandwidth"):
    def measure(setting, shape):
        raise error

    monkeypatch.setattr(importlib.import_module(f"hfpaged.bench.{module}"), "measure", measure)


def run(folder, tmp_path, *words):
    path = tmp_path / "figures.json"
    path.unlink(missing_ok=True)
    code = cli.main([*QUICK, folder, "--json", str(path), *words])
    return code, json.loads(path.read_text()) if path.exists() else None


def test_ctrl_c_tells_the_rows_that_are_done_and_exits_130(folder, tmp_path, monkeypatch, capsys):
    fail_with(monkeypatch, KeyboardInterrupt())
    drawn = tmp_path / "figures.png"
    code, figures = run(folder, tmp_path, "--only", "prefill,waste,bandwidth,python", "--plot", str(drawn))
    assert code == figures["exit_code"] == 130
    assert (figures["interrupted"], figures["rows_planned"]) == (True, 4)
    assert [row["name"] for row in figures["rows"]] == ["prefill", "waste"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == figures["verdict"]
    assert last.startswith("Interrupted after 2 of 4 rows. Same tokens as plain transformers; ")
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_in_the_first_row_leaves_nothing_to_be_told(folder, tmp_path, monkeypatch, capsys):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert run(folder, tmp_path, "--only", "bandwidth,python") == (130, None)
    assert capsys.readouterr().err.splitlines()[-1] == "hfpaged: interrupted"


def test_an_error_comes_after_the_rows_that_are_done(folder, tmp_path, monkeypatch, capsys):
    fail_with(monkeypatch, InvalidConfigError("no such kernel"))
    code, figures = run(folder, tmp_path, "--only", "waste,bandwidth")
    assert code == figures["exit_code"] == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("Stopped by an error after 1 of 2 rows.")
    assert captured.err.splitlines()[-1] == "hfpaged: error: no such kernel"


def test_a_bug_is_raised_as_it_is_after_the_rows_that_are_done(folder, tmp_path, monkeypatch, capsys):
    fail_with(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        run(folder, tmp_path, "--only", "waste,bandwidth")
    assert "waste" in capsys.readouterr().out


def test_a_run_is_compared_with_an_earlier_one(folder, tmp_path, capsys):
    _, figures = run(folder, tmp_path, "--only", "waste,prefill")
    assert figures["comparison"] is None
    old = tmp_path / "old.json"
    old.write_text(json.dumps(figures))
    capsys.readouterr()
    code, found = run(folder, tmp_path, "--only", "waste,python", "--compare", str(old))
    assert code == 0
    assert [row["finding"] for row in found["comparison"]["rows"]] == ["void"]
    out = capsys.readouterr().out
    assert f"only in {old}: prefill" in out
    assert out.splitlines()[-1] == found["verdict"]
    assert found["verdict"].endswith(f"quick runs are too small to judge what became of {old}.")


def test_a_run_of_something_else_is_refused_before_it_is_measured(folder, tmp_path, capsys):
    _, figures = run(folder, tmp_path, "--only", "waste")
    old = tmp_path / "old.json"
    old.write_text(json.dumps(figures))
    assert run(folder, tmp_path, "--only", "prefill", "--compare", str(old)) == (2, None)
    assert "have no row in common" in capsys.readouterr().err
    assert run(folder, tmp_path, "--only", "waste", "--dtype", "bfloat16", "--compare", str(old)) == (2, None)
    captured = capsys.readouterr()
    assert "dtype float32 and bfloat16" in captured.err
    assert captured.out == ""
    assert run(folder, tmp_path, "--compare", str(tmp_path / "missing.json")) == (2, None)
    assert "cannot read" in capsys.readouterr().err


def test_json_to_stdout_is_nothing_but_json(folder, capsys):
    assert cli.main([*QUICK, folder, "--only", "waste", "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert captured.err.splitlines()[-1] == figures["verdict"]


def outcomes(*values):
    rows = {row.name: row for row in choose(None, ROWS)}
    return [
        Outcome(rows[name], rows[name].shape, Measured(value, values=turns), is_judged=name != "python")
        for name, value, turns in values
    ]


HEADER = {"model": "$m_$", "dtype": "float32", "device": "cpu", "threads": 1}


def test_each_unit_has_a_panel_with_bars_spreads_and_targets(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, path: figures.append(figure))
    found = outcomes(
        ("prefill", 1.0, (0.9, 1.0, 1.2)), ("decode-long", 1.5, ()), ("waste", 0.02, ()), ("python", None, ())
    )
    plot.draw("x.png", Conclusion(HEADER, found, 4))
    ratios, shares = figures[0].axes
    assert [bar.get_width() for bar in ratios.patches] == [1.0, 1.5]
    assert [bar.get_width() for bar in shares.patches] == [2.0]
    lines = [tuple(line.get_xdata()) for line in ratios.lines]
    assert lines == [(0.9, 1.2), (0.95, 0.95), (1.5, 1.5), (1.6, 1.6)]
    assert [line.get_xdata()[0] for line in shares.lines] == [2.0, 4.0]
    assert [label.get_text() for label in ratios.get_yticklabels()] == ["prefill\n(n=3)", "decode-long\n(n=1)"]
    assert ratios.patches[0].get_facecolor() != ratios.patches[1].get_facecolor()


def test_a_plot_of_nothing_is_a_plot_that_says_why(tmp_path):
    row = ROWS[1]
    path = tmp_path / "figures.png"
    plot.draw(str(path), Conclusion(HEADER, [Outcome(row, row.shape, Measured(2.0, same_tokens=False))], 1))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "figures.svg"], "only PNG is drawn"),
        (["--plot", "no/such/folder/figures.png"], "its folder does not exist"),
        (["--only", "http-decode"], "give it by --against URL"),
        (["--only", "generate.waste"], "there is no such row"),
    ],
)
def test_a_wrong_option_is_one_line_and_exits_2(words, message, capsys):
    assert cli.main([*QUICK, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_all_kinds_are_measured_in_one_run(folder, tmp_path, capsys):
    path = tmp_path / "figures.json"
    only = "generate.waste,prefix.no-match,quant.int8-decode,batch.pool,serve.http"
    words = ["bench", "all", "--quick", folder, "--only", only, "--json", str(path)]
    assert cli.main(words) == 0
    figures = json.loads(path.read_text())
    assert [row["name"] for row in figures["rows"]] == only.split(",")
    assert [row["name"] for row in figures["rows"] if row["value"] is None] == ["serve.http"]  # it has no tokenizer
    assert figures["header"]["kind"] == "all"
    assert "hfpaged: batch.pool (4 of 5)" in capsys.readouterr().err


def test_all_has_every_row_of_every_kind_by_a_name_of_its_own():
    *single, everything = KINDS
    assert [kind.name for kind in KINDS] == ["generate", "prefix", "quant", "batch", "serve", "all"]
    assert len({row.name for row in everything.rows}) == sum(len(kind.rows) for kind in single)
    directions = {}
    for kind in single:
        for row in kind.rows:
            assert directions.setdefault(row.name, row.is_more_better) == row.is_more_better


def test_without_a_kind_the_help_says_what_there_is(capsys):
    assert cli.main(["bench"]) == 2
    err = capsys.readouterr().err
    for kind in (*KINDS, "compare"):
        assert f"    {getattr(kind, 'name', kind)} " in err
    assert "examples:" in err
    assert "exit codes:" in err
