"""The oldest transformers that we say we support: the table of same tokens runs there too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import two_ranks

OLDEST = "5.17.0"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> Path:
    """A folder with that version and what it depends on, to stand before the installed one."""
    if transformers.__version__ == OLDEST:
        pytest.skip(f"transformers {OLDEST} is installed: the other tests are this test")
    folder = tmp_path_factory.mktemp("oldest")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"transformers=={OLDEST}"]
    subprocess.run(command, check=True, capture_output=True, timeout=400)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), str(ROOT), str(ROOT / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def test_the_folder_really_brings_the_oldest_version(oldest):
    done = run(oldest, "-c", "import transformers; print(transformers.__version__)")
    assert done.stdout.strip() == OLDEST, done.stderr[-2000:]


@pytest.mark.timeout(600)
def test_the_same_tokens_come_out_of_the_oldest_version(oldest):
    chosen = ["tests/test_same_tokens.py", "-k", "llama or mistral or gpt_neox or falcon or gemma2"]
    done = run(oldest, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(600)
def test_families_of_every_kind_work_in_the_oldest_version(oldest):
    names = ["llama", "gemma4_text", "moshi", "falcon_h1", "deepseek_v32", "prophetnet", "mamba"]
    test = "test_a_family_generates_the_tokens_of_its_own_cache_and_support_foretells_how"
    chosen = [f"tests/test_families.py::{test}[{name}]" for name in names]
    done = run(oldest, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(names)} passed" in done.stdout


@pytest.mark.timeout(600)
def test_families_are_batched_in_the_oldest_version(oldest):
    names = ["llama", "gemma2", "falcon_h1", "jamba", "prophetnet", "recurrent_gemma", "mllama"]
    test = "tests/test_batcher_families.py::test_prompts_together_get_the_tokens_of_each_alone"
    done = run(oldest, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{test}[{name}]" for name in names))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(names)} passed" in done.stdout


@pytest.mark.timeout(600)
def test_requests_are_sampled_as_generate_samples_them_in_the_oldest_version(oldest):
    chosen = ["tests/test_engine_sampler.py", "tests/test_engine_params.py", "-k", "those_of_generate or arrives_at"]
    done = run(oldest, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_two_ranks_give_the_tokens_of_one_process_in_the_oldest_version(oldest, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(oldest))
    cases = ["family llama", "family llama_mqa", "way beams", "prefixes"]
    done = two_ranks.run(tmp_path, "tensor_parallel_worker.py", "version", *cases).check()
    assert done.of("version") == [OLDEST] * 2
    for case in cases:
        for rank in done.of(case):
            assert rank["paged"] == rank["plain"], case
