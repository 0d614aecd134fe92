"""One server for all of them. The large ones, which bring gigabytes of their own, are run by `make test-clients`."""

from __future__ import annotations

import os

import pytest
import torch
from product import product as started

ALL = bool(os.environ.get("HFPAGED_CLIENTS"))


def pytest_configure(config):
    config.addinivalue_line("markers", "clients: needs a client with a virtual environment of its own")


def pytest_collection_modifyitems(items):
    reason = "brings a virtual environment of its own: make test-clients"
    for item in items:
        if not ALL and item.get_closest_marker("clients"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def product(tmp_path_factory):
    with started(tmp_path_factory.mktemp("product")) as found:
        yield found


@pytest.fixture(scope="session")
def tools_folder(pytestconfig, tmp_path_factory):
    """Where clients are installed: kept from run to run, where pytest keeps anything."""
    cache = getattr(pytestconfig, "cache", None)
    return cache.mkdir("clients") if cache is not None else tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="session")
def plain(demo):
    """What plain transformers answers greedily: `plain(messages, 12)` is the text of 12 tokens at most."""
    model, tokenizer = demo

    def answer(messages: list[dict[str, str]], max_tokens: int) -> str:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        return continued(prompt["input_ids"], max_tokens)

    def continued(prompt: torch.Tensor, max_tokens: int) -> str:
        with torch.no_grad():
            output = model.generate(prompt, max_new_tokens=max_tokens, do_sample=False)
        return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)

    return answer
