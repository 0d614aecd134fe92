"""What all tests share: a quiet, offline transformers and the demo model, loaded once."""

from __future__ import annotations

import os

# Before anything imports transformers, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from hfpaged import demo_model


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """Small models lose time on many threads."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def demo() -> demo_model.Loaded:
    """SmolLM2-135M-Instruct in float32 on the CPU; whoever patches the model must unpatch it."""
    model, tokenizer = demo_model.load()
    return model.eval(), tokenizer
