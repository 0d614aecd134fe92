"""`hfpaged telemetry export` writes out what is shipped, and keeps what was changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hfpaged import cli
from hfpaged.errors import InvalidConfigError
from hfpaged.telemetry.exporting import SHIPPED, export, read_shipped


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}


def test_export_writes_all_files_into_a_new_folder_and_says_what_to_do_with_them(tmp_path, capsys):
    folder = tmp_path / "new" / "monitoring"
    assert cli.main(["telemetry", "export", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in SHIPPED} == {name: read_shipped(name) for name in SHIPPED}
    assert names_in(folder) == set(SHIPPED)
    told = capsys.readouterr().out
    assert all(re.search(rf"written +{re.escape(name)} ", told) for name in SHIPPED)
    assert f"cd {folder} && docker compose up" in told
    assert "start_http_server(9464)" in told


def test_export_says_what_was_there_already(tmp_path):
    export(tmp_path)
    (tmp_path / "traces.md").unlink()
    states = dict(export(tmp_path))
    assert states == dict.fromkeys(SHIPPED, "unchanged") | {"traces.md": "written"}


def test_export_keeps_what_was_changed_and_then_writes_nothing(tmp_path, capsys):
    (tmp_path / "alerts.yml").write_text("mine")
    assert cli.main(["telemetry", "export", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"alerts.yml in {tmp_path} differs from what is shipped (1 of {len(SHIPPED)} files)" in told
    assert "--force" in told
    assert names_in(tmp_path) == {"alerts.yml"}
    assert (tmp_path / "alerts.yml").read_text() == "mine"


def test_export_replaces_what_was_changed_when_it_is_told_to(tmp_path, capsys):
    (tmp_path / "alerts.yml").write_text("mine")
    (tmp_path / "own.yml").write_text("mine")
    assert cli.main(["telemetry", "export", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "alerts.yml").read_bytes() == read_shipped("alerts.yml")
    assert (tmp_path / "own.yml").read_text() == "mine"
    assert re.search(r"replaced +alerts\.yml", capsys.readouterr().out)
    assert names_in(tmp_path) == {*SHIPPED, "own.yml"}


@pytest.mark.parametrize("force", [False, True])
def test_export_names_what_cannot_be_written(tmp_path, force):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfigError, match=r"file.*: Not a directory; give a folder"):
        export(tmp_path / "file", force=force)
    (tmp_path / "traces.md").mkdir()
    with pytest.raises(InvalidConfigError, match=r"traces\.md: Is a directory; give a folder"):
        export(tmp_path, force=force)


def test_the_command_loads_neither_torch_nor_transformers(tmp_path):
    code = (
        "import sys; from hfpaged import cli\n"
        f"assert cli.main(['telemetry', 'export', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'opentelemetry', 'prometheus_client'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
