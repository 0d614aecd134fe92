"""`hfpaged bench compare` and --compare: what became better or regressed, told from two files, without a model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hfpaged import cli
from hfpaged.bench import comparison_report, figures_file, report
from hfpaged.bench.catalog import ROWS
from hfpaged.bench.comparison import Finding, compare
from hfpaged.bench.conclusion import Conclusion
from hfpaged.bench.kinds import KINDS, every_row
from hfpaged.bench.result import Measured, Outcome
from hfpaged.bench.target import Target
from hfpaged.errors import InvalidConfigError

HEADER = {
    "kind": "generate", "model": "some/folder/tiny", "parameters": 1000, "dtype": "float32", "device": "cpu",
    "threads": 2, "kernels": "numba", "torch": "2.9", "transformers": "5.0", "hfpaged": "0.7", "repeats": 3,
    "quick": False,
}  # fmt: skip
BEFORE = ("name", "what", "shape", "target", "met", "value", "plain", "paged", "unit", "same_tokens", "note")


def record(rows, **header):
    """What a run writes; `rows` has the values of the turns by name, the middle one counts."""
    names = every_row()
    outcomes = []
    for name, values in rows.items():
        values = values if isinstance(values, tuple) else (values,)
        middle = sorted(values)[len(values) // 2]
        outcomes.append(Outcome(names[name], names[name].shape, Measured(middle, same_tokens=True, values=values)))
    return json.loads(json.dumps(report.as_json({**HEADER, **header}, outcomes, 0)))


def compared(old, new, tolerance=0.05):
    return compare(figures_file.from_record("old", old), figures_file.from_record("new", new), tolerance)


def findings(old, new):
    return {change.new.name: change.finding.value for change in compared(record(old), record(new)).changes}


@pytest.mark.parametrize(
    ("name", "old", "new", "finding"),
    [
        ("prefill", 1.0, 0.96, "same"),  # within 5 %
        ("prefill", 1.0, 0.9, "REGRESSED"),
        ("prefill", 1.0, 1.1, "better"),
        ("prefill", (0.85, 1.0, 1.2), (0.8, 0.9, 1.0), "same"),  # within the spread
        ("prefill", (0.95, 1.0, 1.2), (0.8, 0.9, 0.94), "REGRESSED"),
        ("prefill", (0.95, 1.0, 1.2), (1.1, 1.3, 1.4), "same"),
        ("prefill", (0.95, 1.0, 1.05), (1.1, 1.3, 1.4), "better"),
        ("beam-memory", 0.40, 0.44, "REGRESSED"),  # less is better
        ("beam-memory", 0.40, 0.36, "better"),
        ("python", 0.01, 0.03, "same"),  # a cost: 2 points of the whole
        ("python", 0.01, 0.08, "REGRESSED"),
        ("overhead-256", 1.0, 1.2, "REGRESSED"),  # milliseconds
        ("int8-ppl-hqq", -0.001, 0.002, "same"),
        ("int8-bytes-hqq", 0.70, 0.80, "REGRESSED"),  # no target
        ("http-decode", 1.0, 0.8, "REGRESSED"),
        ("between", 0.0, 0.2, "REGRESSED"),
    ],
)
def test_a_row_regresses_beyond_the_tolerance_and_beyond_both_spreads(name, old, new, finding):
    assert findings({name: old}, {name: new}) == {name: finding}


def test_the_tolerance_is_what_one_says():
    old, new = record({"prefill": 1.0}), record({"prefill": 0.9})
    assert compared(old, new, 0.15).changes[0].finding is Finding.SAME
    assert compared(old, new, 0.15).exit_code == 0
    assert compared(old, new, 0.05).exit_code == 4


def write(folder, name, figures):
    path = folder / name
    path.write_text(figures if isinstance(figures, str) else json.dumps(figures))
    return str(path)


def test_two_files_are_compared_with_a_table_a_verdict_and_an_exit_code(tmp_path, capsys):
    old = write(tmp_path, "old.json", record({"prefill": (0.9, 1.0, 1.1), "waste": 0.01, "decode-long": 1.6}))
    new = write(tmp_path, "new.json", record({"prefill": (0.7, 0.75, 0.8), "waste": 0.01, "python": 0.1}, torch="2.10"))
    found = tmp_path / "found.json"
    assert cli.main(["bench", "compare", old, new, "--json", str(found)]) == 4
    out = capsys.readouterr().out
    assert "25.0 % worse" in out
    assert "REGRESSED" in out
    assert f"torch: 2.9 in {old}, 2.10 in {new}" in out
    assert f"only in {old}: decode-long" in out
    assert f"only in {new}: python" in out
    verdict = f"REGRESSED against {old}: prefill by 25.0 %; 1 the same."
    assert out.splitlines()[-1] == verdict
    told = json.loads(found.read_text())
    assert (told["verdict"], told["exit_code"], told["tolerance"]) == (verdict, 4, 0.05)
    assert [(row["name"], row["finding"]) for row in told["rows"]] == [("prefill", "REGRESSED"), ("waste", "same")]
    assert told["rows"][0]["worse"] == pytest.approx(0.25)
    assert cli.main(["bench", "compare", old, old]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"No regression against {old}: 3 the same."
    assert cli.main(["bench", "compare", old, new, "--tolerance", "30%"]) == 0


def test_json_to_stdout_is_nothing_but_json(tmp_path, capsys):
    old = write(tmp_path, "old.json", record({"prefill": 1.0}))
    assert cli.main(["bench", "compare", old, old, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == 0
    assert "No regression" in captured.err


def test_a_file_of_the_version_before_can_be_read():
    old, new = record({"prefill": 1.0, "int8-bytes-hqq": 0.7}), record({"prefill": 0.8, "int8-bytes-hqq": 0.8})
    old["rows"] = [{name: row[name] for name in BEFORE} for row in old["rows"]]
    old["header"] = {name: value for name, value in old["header"].items() if name != "kind"}
    assert [change.finding for change in compared(old, new).changes] == [Finding.REGRESSED, Finding.REGRESSED]
    assert [change.finding for change in compared(new, old).changes] == [Finding.BETTER, Finding.BETTER]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "holds list, no object; expected is what `hfpaged bench KIND --json FILE` writes"),
        ('{"figures": [], "header": {}}', "has figures, header; expected is"),
        ('{"header": {}, "rows": [{"name": "prefill"}]}', "row 1 cannot be read (it has no 'value')"),
        ('{"header": {}, "rows": [{"name": "prefill", "value": NaN}]}', "nan is no number"),
        ('{"header": {}, "rows": [{"name": "prefill", "value": "fast"}]}', "'fast' is no number"),
        ('{"header": {}, "rows": [{"name": "prefill", "value": 1, "target": "good"}]}', "'good' is no target"),
        ('{"header": {}, "rows": [7]}', "row 1 cannot be read"),
        ('{"header": {}, "rows": []}', "have no row in common: the one has none, the other prefill"),
    ],
)
def test_a_damaged_file_is_one_line_that_says_what_was_expected(text, words, tmp_path, capsys):
    old = str(tmp_path / "old.json")
    if text is not None:
        write(tmp_path, "old.json", text)
    new = write(tmp_path, "new.json", record({"prefill": 1.0}))
    assert cli.main(["bench", "compare", old, new]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert old in line


def test_what_is_no_text_is_no_json(tmp_path, capsys):
    (tmp_path / "old.json").write_bytes(b"\xff\xfe\x00")
    assert cli.main(["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "old.json")]) == 2
    assert "is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model": "another"}, "model tiny and another"),
        ({"parameters": 7}, "parameters 1000 and 7"),
        ({"dtype": "bfloat16"}, "dtype float32 and bfloat16"),
        ({"device": "cuda:0 (A card)"}, "device cpu and cuda:0 (A card)"),
        ({"threads": 8}, "threads 2 and 8"),
        ({"quick": True}, "quick False and True"),
        ({"kind": "batch"}, "kind generate and batch"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(other, words):
    rows = {"prefill": 1.0}
    with pytest.raises(InvalidConfigError, match="are of different things") as raised:
        compared(record(rows), record(rows, **other))
    assert words in str(raised.value)


def test_the_same_model_in_another_folder_is_compared_and_versions_are_told():
    rows = {"prefill": 1.0}
    found = compared(record(rows), record(rows, model="/elsewhere/tiny", hfpaged="0.8", cpu="one"))
    assert found.told == ["hfpaged: 0.7 in old, 0.8 in new"]
    assert found.exit_code == 0


def test_tokens_that_differed_void_it_all():
    old, new = record({"prefill": 1.0, "waste": 0.01}), record({"prefill": 2.0, "waste": 0.01})
    wrong = [Outcome(row, row.shape, Measured(2.0, same_tokens=False)) for row in ROWS if row.name == "prefill"]
    voided = json.loads(json.dumps(report.as_json(HEADER, wrong, 1)))
    for pair in ((old, voided), (voided, new)):
        found = compared(*pair)
        assert [change.finding for change in found.changes] == [Finding.VOID]
        assert found.exit_code == 1
        assert comparison_report.sentence(found).startswith("The tokens differed in prefill (")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": {"batch": 1, "prompt": 7, "new": 1, "own": 0}}, "other sizes"),
        ({"value": None}, "not measured in both"),
        ({"rival": "http://elsewhere"}, "over http://elsewhere, now over transformers"),
    ],
)
def test_a_row_that_says_nothing_about_the_other_is_void(change, reason):
    old, new = record({"prefill": 1.0, "waste": 0.01}), record({"prefill": 0.5, "waste": 0.01})
    old["rows"][0] |= change
    found = compared(old, new)
    assert [(one.finding, one.reason) for one in found.changes[:1]] == [(Finding.VOID, reason)]
    assert found.exit_code == 0
    assert comparison_report.sentence(found) == "No regression against old: 1 the same, 1 not comparable."
    alone = compared({**old, "rows": old["rows"][:1]}, new)
    assert alone.exit_code == 2
    assert comparison_report.sentence(alone) == f"No row can be compared with old: {reason}."


def test_a_row_that_nobody_knows_has_no_better_way():
    rows = [{"name": "unheard-of", "value": value, "target": None} for value in (1.0, 0.5)]
    found = compared({"header": HEADER, "rows": rows[:1]}, {"header": HEADER, "rows": rows[1:]})
    assert found.changes[0].reason == "it is not known which way is better"


def test_quick_runs_judge_nothing():
    found = compared(record({"prefill": 1.0}, quick=True), record({"prefill": 0.5}, quick=True))
    assert found.exit_code == 0
    assert [(change.finding, change.worse) for change in found.changes] == [(Finding.VOID, 0.5)]
    assert "too small to judge" in comparison_report.sentence(found)


def test_single_runs_say_that_their_noise_is_not_known_and_counts_have_none():
    old, new = record({"prefill": 1.0, "waste": 0.0}), record({"prefill": 0.5, "waste": 1.0})
    new["rows"][1]["values"] = []
    assert [change.reason for change in compared(old, new).changes] == ["timed once: noise is not known", ""]


def test_a_regression_counts_more_than_a_target_and_less_than_a_wrong_token():
    old = figures_file.from_record("old.json", record({"prefill": 1.0}))
    (row,) = (row for row in ROWS if row.name == "prefill")
    codes = []
    for same in (True, False):
        outcomes = [Outcome(row, row.shape, Measured(0.5, same_tokens=same))]
        found = Conclusion(HEADER, outcomes, 1, None, True, old, 0.05)
        codes.append(found.exit_code)
        assert found.as_json()["comparison"]["verdict"] in found.verdict
    assert codes == [4, 1]
    assert Conclusion(HEADER, outcomes, 1, KeyboardInterrupt(), True, old, 0.05).exit_code == 130


def test_every_target_is_read_as_it_is_written():
    targets = {row.target for kind in KINDS for row in kind.rows if row.target is not None}
    assert len(targets) > 15
    for target in targets:
        assert Target.parse(str(target)) == target
    with pytest.raises(ValueError, match="one is written as"):
        Target.parse("= 3")


@pytest.mark.parametrize("tolerance", ["-1", "many", "100"])
def test_a_tolerance_is_a_percentage(tolerance, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "compare", "a", "b", f"--tolerance={tolerance}"])
    assert "no percentage from 0 to 99" in capsys.readouterr().err


def test_comparing_two_files_asks_for_no_torch(tmp_path):
    old = write(tmp_path, "old.json", record({"prefill": 1.0}))
    code = (
        "import sys; from hfpaged import cli; "
        f"code = cli.main(['bench', 'compare', {old!r}, {old!r}]); print('torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"
