"""The README is run: its test command by .ci/run, its Python here, in order and in one namespace."""

from __future__ import annotations

import re

import pytest
import yaml
from readme_blocks import README, ROOT, alike, blocks
from test_doctor_rules import TRIGGERS, found

ALERTS = ROOT / "hfpaged" / "telemetry" / "shipped" / "alerts.yml"
INSTALL_AND_TEST = re.compile(r"^.*pip install .*\[test\].*&& pytest.*$", re.MULTILINE)


def python_blocks(text=README):
    """Each with the output that is shown right behind it, None where none is."""
    found = blocks(text)
    shown = {block.number - 1: block.body for block in found if block.language == "text" and block.is_adjacent}
    return [(block, shown.get(block.number)) for block in found if block.language == "python" and block.runs]


def test_the_test_command_of_the_readme_is_what_ci_runs():
    commands = [line.strip() for line in INSTALL_AND_TEST.findall(README)]
    assert len(commands) == 1, f"README.md should have one line that installs '.[test]' and runs pytest: {commands}"
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.demo_model
def test_the_python_of_the_readme_runs_and_prints_what_is_shown(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme", "model": demo[0], "tokenizer": demo[1]}
    for block, shown in python_blocks():
        capsys.readouterr()
        exec(compile(block.body, block.name, "exec"), namespace)
        printed = capsys.readouterr().out
        assert shown is None or alike(shown, printed), f"{block.name} printed\n{printed}"


def test_the_examples_show_what_they_print():
    assert sum(shown is not None for _, shown in python_blocks()) >= 6


def test_a_block_behind_the_mark_is_skipped_and_output_belongs_to_the_block_before_it():
    text = (
        "```python\none\n```\n\n```text\n1\n```\n\n<!-- no-run: why -->\n```python\ntwo\n```\n\n"
        "```bash\nthree\n```\n\n```python\nfour\n```\n\nand\n\n```text\n4\n```\n"
    )
    assert [(block.body, shown) for block, shown in python_blocks(text)] == [("one\n", "1\n"), ("four\n", None)]


def test_output_is_compared_but_for_numbers_and_what_is_left_out():
    assert alike("3 of 4 blocks\n...\nall is well\n", "14 of 15 blocks\nmore\nall is  well")
    assert alike("a ... d", "a b c d")
    assert not alike("3 of 4 blocks", "3 of 4 tokens")
    assert not alike("all is well", "all is well, or not")


def test_each_alert_that_is_shipped_has_its_line_and_its_command():
    shipped = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
               if "alert" in rule]  # fmt: skip
    rows = dict(re.findall(r"^\| `(Hfpaged\w+)` \|(.*)$", README, re.MULTILINE))
    assert sorted(rows) == sorted(shipped)
    assert [name for name, row in rows.items() if not re.search(r"`(hfpaged|curl) ", row)] == []


def test_what_the_doctor_says_in_the_readme_is_what_it_can_say():
    shown = re.findall(r"^(?:PROBLEM|ADVICE):?  ?(\S.*)$", README, re.MULTILINE)
    titles = {str(found(rule, case.figures).title) for rule, cases in TRIGGERS.items() for case in cases}
    assert len(shown) >= 4
    assert set(shown) - titles == set()
    named = re.findall(r"\*(The KV pool is full|Preemption thrash|Out of memory is near)\*", README)
    assert [name for name in named if not any(title.startswith(name) for title in titles)] == []


def test_links_inside_of_the_readme_lead_somewhere():
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) - anchors == set()
