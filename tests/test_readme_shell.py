"""The shell of the README is run, in order, in one folder with a tiny model as ./my-model, against its own server.

What the net or minutes are needed for is marked, and parsed at least, as is each command in a sentence.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import serve_models
from product import environment
from readme_blocks import Block, alike, hfpaged_commands, outside_of_blocks, shell_blocks
from served import wait_until

from hfpaged import cli

PATIENCE = 240.0  # seconds; a machine may be busy
ADDRESS = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000")
SERVE = re.compile(r"^(?:hfpaged serve\b.*|\$\(.*--for serve\).*)$", re.MULTILINE)


def test_no_shell_hides_outside_of_the_blocks():
    lines = outside_of_blocks().splitlines()
    assert [line for line in lines if re.match(r"( {4}|\t)\s*\S", line)] == []
    assert "```" not in outside_of_blocks()


@pytest.mark.parametrize("words", [pytest.param(words, id=shlex.join(words)[:60]) for words in hfpaged_commands()])
def test_the_command_parses(words, capsys):
    if len(words) == 1 and words[0] in cli.COMMANDS:  # the name of a command, in a sentence
        return
    words = [cli._with_dashes(word) for word in words]
    try:
        cli.build_parser(words).parse_args(words)
    except SystemExit:
        told = capsys.readouterr()
        assert not told.err, told.err  # --help leaves as well


def test_what_is_not_run_has_a_reason():
    assert all(block.marks["no-run"] for block in shell_blocks() if not block.runs)
    assert sum(block.runs for block in shell_blocks()) >= 10


class Session:
    """A folder, a PATH with this hfpaged, and the server that the README has started last."""

    def __init__(self, folder, python):
        self.folder = folder
        self._python = python
        self.address = "127.0.0.1:9"
        self._server = None
        self.environment = environment({"COLUMNS": "120", "NO_COLOR": "1", "HFPAGED_API_KEY": ""})
        self.environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._put_on_path("hfpaged", f'exec {shlex.quote(python)} -m hfpaged "$@"')

    def _put_on_path(self, name, line):
        (self.folder / "bin").mkdir(exist_ok=True)
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)

    def run(self, script):
        """(exit code, stdout, stderr) of a script in which nothing may fail but the last command."""
        script = ADDRESS.sub(self.address, script)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self.folder, env=self.environment, timeout=PATIENCE,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def serve(self, line):
        """What it said until it was ready. The line may be what another command prints."""
        self.stop()
        if line.startswith("$("):
            asked, _, more = line[2:].partition(")")
            line = self.run(asked)[1].strip() + more
        words = shlex.split(line, comments=True)[2:]
        words = words if words and not words[0].startswith("-") else ["./my-model", *words]  # for the demo model
        told, log = self.folder / "serve.out", self.folder / "serve.err"
        with told.open("w") as out, log.open("w") as err:
            self._server = subprocess.Popen(
                [self._python, "-m", "hfpaged.serve", *words, "--port", "0"], cwd=self.folder, env=self.environment,
                stdout=out, stderr=err,
            )  # fmt: skip
        wait_until(lambda: "ready: " in told.read_text() or self._server.poll() is not None, PATIENCE)
        ready = re.search(r"ready: http://([\w.:]+)", told.read_text())
        if ready is None:
            self._server.kill()
            self._server = None
        assert ready is not None, log.read_text()
        self.address = ready[1]
        return told.read_text()

    def stop(self):
        if self._server is None:
            return
        self._server.send_signal(signal.SIGTERM)
        try:
            assert self._server.wait(PATIENCE) == 0, (self.folder / "serve.err").read_text()
        finally:
            self._server.kill()
            self._server = None


@pytest.fixture(scope="module")
def session(tmp_path_factory, warm):
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("the README's shell needs bash and curl")
    folder = tmp_path_factory.mktemp("readme")
    serve_models.save(folder / "my-model")
    found = Session(folder, warm)
    yield found
    found.stop()


def test_the_shell_of_the_readme_runs(session):
    for block in shell_blocks():
        if block.runs:
            _run(session, block)


def _run(session, block: Block):
    """Servers start last, and go on while the blocks behind run."""
    commands = block.commands
    for number, command in enumerate(commands, start=1):
        code, out, err = 0, "", ""
        if rest := SERVE.sub("", command.line).strip():
            code, out, err = session.run(rest)
        for line in SERVE.findall(command.line):
            out += session.serve(line)
        wanted = block.exit_codes if number == len(commands) else {0}
        assert code in wanted, f"{block.name}: {command.line}ended with {code}:\n{out}{err}"
        if command.shown.strip():
            compare(command.shown, out + err, exact="exact" in block.marks, where=f"{block.name}: {command.line}")


def compare(shown, got, *, exact, where):
    """Fails where the README shows what does not come: all of it, the keys of JSON, or half of its longer words."""
    if exact:
        assert alike(shown, got, numbers=True), f"{where}printed\n{got}"
        return
    keys = set(re.findall(r'"(\w+)":', shown))
    assert not keys - set(re.findall(r'"(\w+)":', got)), f"{where}printed\n{got}"
    words = set(re.findall(r"[A-Za-z]{4,}", shown))
    assert keys or len(words & set(re.findall(r"[A-Za-z]{4,}", got))) >= len(words) / 2, f"{where}printed\n{got}"
