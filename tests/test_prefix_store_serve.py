"""Services in processes of their own, `hfpaged serve`, that share a prefix store."""

from __future__ import annotations

import contextlib
import re
import threading

import httpx
import pytest
import serving
from served import PATIENCE, wait_until
from served_command import command

from hfpaged import cli
from hfpaged.serve import flag_types

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "A text that many services are asked about, again and again, and again. " * 2
OTHERS = [f"{number} bottles stand on a wall, and one of them falls. " * 3 for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that `hfpaged serve` can load."""
    return serving.save(tmp_path_factory.mktemp("tiny"))


def service(folder, path):
    return command(folder, "--served-model-name", "tiny", "--block-size", "4", "--prefix-store", str(path))


def ask(url, prompt=PROMPT, **options):
    """(text, prompt tokens that were known)."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0} | options
    answer = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE).raise_for_status().json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def files(path):
    return len(list(path.glob("*.safetensors")))


def flood(url):
    """Ask until the service is gone."""
    with contextlib.suppress(httpx.HTTPError):
        for prompt in OTHERS:
            ask(url, prompt)


def test_one_begins_with_what_another_computed_that_runs_on_was_killed_or_stopped(folder, tmp_path):
    path = tmp_path / "store"
    with service(folder, path) as first:
        url = first.url
        assert "prefix store" in first.output.read_text()
        text, cached, length = ask(url)
        assert cached == 0
        wait_until(lambda: files(path) >= length // 4)
        with service(folder, path) as second:  # while the first one runs on
            other = second.url
            assert ask(other) == (text, (length - 1) // 4 * 4, length)
            assert ask(other, cache_salt="tenant")[:2] == (text, 0)
            answer = ask(other, OTHERS[0])
            wait_until(lambda: files(path) >= 2 * (length // 4) + answer[2] // 4)
            assert ask(url, OTHERS[0]) == (answer[0], (answer[2] - 1) // 4 * 4, answer[2])
        enough = files(path) + 20
        asking = threading.Thread(target=flood, args=(url,))
        asking.start()
        wait_until(lambda: files(path) > enough)
        first.process.kill()  # while it writes
        first.process.wait()
        asking.join()
    with service(folder, path) as third:  # after both were killed
        url = third.url
        assert ask(url) == (text, (length - 1) // 4 * 4, length)
        answers = [ask(url, prompt) for prompt in OTHERS]
        assert sum(cached for _, cached, _ in answers) > answer[2]
        for prompt, (found, _, _) in zip(OTHERS[:4], answers, strict=False):
            assert ask(url, prompt, cache_salt="computed anew")[0] == found
        metrics = httpx.get(url + "/metrics").text
        third.process.terminate()
        assert third.process.wait(PATIENCE) == 0
        told = third.errors.read_text()
    assert "Traceback" not in told
    assert "is not used and removed" not in told
    assert re.search(r'^hfpaged_prefix_store_blocks_total{.*event="read".*} [1-9]', metrics, re.MULTILINE)
    assert "hfpaged_prefix_store_used_bytes" in metrics
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_directory_is_named_as_processes_that_work_elsewhere_find_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert flag_types.folder("kv") == str(tmp_path / "kv")
    assert flag_types.folder("~/kv") == str(tmp_path / "home" / "kv")


def test_a_directory_that_cannot_be_used_is_said_before_the_model_is_loaded(folder, tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"")
    assert cli.main(["serve", str(folder), "--port", "0", "--prefix-store", str(tmp_path / "file")]) == 2
    assert "is no directory and cannot be made one" in capsys.readouterr().err
