"""`transformers chat`, which knows servers by `transformers serve`: /load_model, generation_config, no key at first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from sysconfig import get_path

import pytest

pytestmark = pytest.mark.demo_model
TRANSFORMERS = Path(get_path("scripts")) / "transformers"
FIRST, SECOND = "What is the capital of France?", "And of Italy?"


@pytest.fixture
def chat(product, tmp_path):
    def run(model, lines, *flags):
        command = [sys.executable, TRANSFORMERS, "chat", model, product.api, *flags]
        # huggingface_hub's client takes "offline" for every host.
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
        env = clean | {"HF_TOKEN": product.key, "TERM": "dumb", "COLUMNS": "100"}  # its client's key is that of the hub
        typed = "".join(line + "\n" for line in lines)
        return subprocess.run(command, cwd=tmp_path, env=env, input=typed, capture_output=True, text=True, timeout=300)

    return run


def test_a_conversation_has_the_answers_of_plain_transformers(chat, product, plain):
    done = chat(product.model, [FIRST, SECOND, "!exit"], "max_new_tokens=12", "do_sample=False")
    assert done.returncode == 0, done.stderr
    asked = [{"role": "user", "content": FIRST}]
    answer = plain(asked, 12)
    again = plain([*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": SECOND}], 12)
    assert answer in done.stdout
    assert again in done.stdout


def test_its_generation_flags_are_heeded(chat, product, plain):
    asked = "Tell me a long story."
    done = chat(product.model, [asked, "n", "!exit"], "max_new_tokens=5", "do_sample=False")
    assert done.returncode == 0, done.stderr
    written = done.stdout.partition("Generation stopped after reaching the token limit.")[0]
    assert written.rstrip().endswith(plain([{"role": "user", "content": asked}], 5).rstrip())


def test_a_model_that_is_not_there_is_told_in_words(chat):
    done = chat("nothing", ["!exit"])
    assert done.returncode != 0
    assert "there is no model 'nothing' here" in done.stdout + done.stderr
