"""The command `llm`, whose models come from extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

pytestmark = [
    pytest.mark.demo_model, pytest.mark.skipif(find_spec("llm") is None, reason="needs llm: pip install llm"),
]  # fmt: skip
FIRST, SECOND = "What is the capital of France?", "And of Italy?"


@pytest.fixture
def llm(product, tmp_path):
    """Runs the command with a folder of its own."""
    chat = {
        "model_id": "served", "model_name": product.model, "api_base": product.api, "api_key_name": "served",
        "supports_tools": True, "supports_schema": True,
    }  # fmt: skip
    text = chat | {"model_id": "served-text", "completion": True}
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([chat, text]))
    (tmp_path / "keys.json").write_text(json.dumps({"served": product.key}))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        command = [sys.executable, "-m", "llm", *words]
        return subprocess.run(
            command, env=env | {"LLM_USER_PATH": str(tmp_path)}, capture_output=True, text=True, check=True, timeout=300
        )

    return run


def options(max_tokens=12):
    return ["-o", "max_tokens", str(max_tokens), "-o", "temperature", "0"]


def test_a_conversation_goes_on_and_finds_its_beginning_in_the_cache(llm, plain):
    first = llm("-m", "served", FIRST, *options(), "--usage")
    asked = [{"role": "user", "content": FIRST}]
    assert first.stdout.strip() == plain(asked, 12).strip()
    prompt, answer = map(int, re.findall(r"([\d,]+) (?:input|output)", first.stderr))
    second = llm("-c", SECOND, *options(), "--usage")  # a stream, as everything without --no-stream
    asked += [{"role": "assistant", "content": first.stdout.strip()}, {"role": "user", "content": SECOND}]
    assert second.stdout.strip() == plain(asked, 12).strip()
    logged = json.loads(llm("logs", "--json", "-n", "1").stdout)[0]
    assert logged["input_tokens"] > prompt + answer
    assert json.loads(logged["token_details"])["prompt_tokens_details"]["cached_tokens"] >= prompt - prompt % 16


def test_without_a_stream_the_answer_and_its_tokens_are_the_same(llm):
    streamed, whole = (llm("-m", "served", FIRST, *options(), "--usage", *how) for how in ((), ("--no-stream",)))
    assert whole.stdout == streamed.stdout
    assert whole.stderr.split(",")[:2] == streamed.stderr.split(",")[:2]


def test_a_completion_model_goes_on_with_the_text(llm):
    assert "100" in llm("-m", "served-text", "Water boils at", *options(6)).stdout


def test_a_schema_is_kept(llm):
    made = llm("-m", "served", "Invent a dog", "--schema", "barks bool, legs int", *options(96))
    dog = json.loads(made.stdout)
    assert {name: type(value) for name, value in dog.items()} == {"barks": bool, "legs": int}
