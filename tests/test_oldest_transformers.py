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
NEEDS = ["huggingface-hub<2"]  # of what it depends on all that the newest transformers does not take as well
SAME_TOKENS = "test_same_tokens and (llama or mistral or gpt_neox or falcon or gemma2)"
SAMPLED = "(test_engine_sampler or test_engine_params) and (those_of_generate or arrives_at)"
FAMILY = "test_families.py::test_a_family_generates_the_tokens_of_its_own_cache_and_support_foretells_how"
FAMILIES = ["llama", "gemma4_text", "moshi", "falcon_h1", "deepseek_v32", "prophetnet", "mamba"]
BATCHED = "test_batcher_families.py::test_prompts_together_get_the_tokens_of_each_alone"
FAMILIES_BATCHED = ["llama", "gemma2", "falcon_h1", "jamba", "prophetnet", "recurrent_gemma", "mllama"]
RUN = (
    "import sys, transformers, pytest; print('version', transformers.__version__); sys.exit(pytest.main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> Path:
    """A folder with that version, to stand before the installed one; it looks at the versions of others itself."""
    if transformers.__version__ == OLDEST:
        pytest.skip(f"transformers {OLDEST} is installed: the other tests are this test")
    folder = tmp_path_factory.mktemp("oldest")
    how = ["--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *how, f"transformers=={OLDEST}", *NEEDS]
    subprocess.run(command, check=True, capture_output=True, timeout=400)
    return folder


@pytest.mark.timeout(1500)
def test_tokens_families_batches_and_samples_are_right_in_the_oldest_version(oldest):
    """One process for all: to import and to collect takes as long as many tests."""
    paths = [str(oldest), str(ROOT), str(ROOT / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""}
    named = [f"{test}[{name}]" for test, names in ((FAMILY, FAMILIES), (BATCHED, FAMILIES_BATCHED)) for name in names]
    files = ["test_same_tokens.py", "test_engine_sampler.py", "test_engine_params.py"]
    chosen = f"({SAME_TOKENS}) or ({SAMPLED}) or test_families or test_batcher_families"
    words = ["-v", "-p", "no:cacheprovider", *(f"tests/{each}" for each in [*files, *named]), "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"version {OLDEST}\n" in done.stdout
    passed = [line.partition(" ")[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert {f"tests/{each}" for each in named} <= set(passed)
    assert all(any(f"tests/{file}::" in each for each in passed) for file in files)


def test_two_ranks_give_the_tokens_of_one_process_in_the_oldest_version(oldest, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(oldest))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    cases = ["family llama", "family llama_mqa", "way beams", "prefixes"]
    done = two_ranks.run(tmp_path, "tensor_parallel_worker.py", "version", *cases).check()
    assert done.of("version") == [OLDEST] * 2
    for case in cases:
        for rank in done.of(case):
            assert rank["paged"] == rank["plain"], case
