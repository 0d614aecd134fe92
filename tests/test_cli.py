from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hfpaged import cli
from hfpaged.errors import HfpagedError


@pytest.fixture
def command(monkeypatch):
    """Put a stand-in with the given run() where the demo command would be imported from."""

    def install(run):
        def add_parser(subparsers):
            subparsers.add_parser("demo").add_argument("--count", type=int, default=0)

        module = types.SimpleNamespace(add_parser=add_parser, run=run)
        monkeypatch.setitem(sys.modules, "hfpaged.demo", module)

    return install


def raises(error):
    def run(args):
        raise error

    return run


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys; from hfpaged import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'rich', 'hfpaged.demo'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(re.search(rf"^    {name}\s", done.stdout, re.MULTILINE) for name in cli.COMMANDS)
    assert "examples:" in done.stdout


def test_python_dash_m_says_the_version():
    done = subprocess.run([sys.executable, "-m", "hfpaged", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"hfpaged {cli.importlib.metadata.version('hfpaged')}\n"


def test_the_exit_code_is_the_commands_own(command):
    command(lambda args: args.count)
    assert cli.main(["demo", "--count", "1"]) == 1


def test_an_error_of_ours_is_one_line_and_exits_2(command, capsys):
    command(raises(HfpagedError("asked for 3 blocks, 2 are free")))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "hfpaged: error: asked for 3 blocks, 2 are free\n"


def test_an_interrupt_is_one_line_and_exits_130(command, capsys):
    command(raises(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "hfpaged: interrupted\n"


def test_who_reads_no_further_gets_no_traceback(tmp_path):
    line = [sys.executable, "-m", "hfpaged", "telemetry", "export", str(tmp_path)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "hfpaged", "telemetry", "export", str(tmp_path)]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "hfpaged: error: the disk is full; make room and run it again\n")


def test_a_bug_keeps_its_traceback(command):
    command(raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["demo", "--no-such-option"]])
def test_a_wrong_line_exits_2_and_says_in_one_line_where_help_is(command, capsys, words):
    command(lambda args: 0)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpaged")
    assert line.endswith("--help")


MISSPELT = {
    "serve --prot 1": ("hfpaged serve", "--prot (did you mean --port?)"),
    "serve --max_model_length=8": ("hfpaged serve", "--max-model-length=8 (did you mean --max-model-len?)"),
    "bench generate --repaets 3": ("hfpaged bench generate", "--repaets (did you mean --repeats?)"),
    "plan m --devise h100": ("hfpaged plan", "--devise h100 (did you mean --device?)"),
    "telemetry export d --xyz": ("hfpaged telemetry export", "--xyz"),
    "stress m n": ("hfpaged stress", "n"),
}


@pytest.mark.parametrize(("words", "said"), MISSPELT.items(), ids=MISSPELT)
def test_a_flag_that_a_command_does_not_know_is_its_own_error_with_the_nearest_one(capsys, words, said):
    program, named = said
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert capsys.readouterr().err == f"{program}: error: unrecognized arguments: {named}; see {program} --help\n"
