"""What all tests share: a quiet, offline transformers and the demo model, loaded once."""

from __future__ import annotations

import gc
import os

# Before anything imports transformers, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two processes with two threads each on two cores wait for one another, and a thread that waits by spinning takes the
# core from the one that it waits for: 10 to 20 times slower. Before anything imports torch, too.
os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} if "PYTEST_XDIST_WORKER" in os.environ else {})

import forked
import pytest
import torch
from filelock import FileLock
from hfpaged_kernels import cpu_threads
from transformers import MistralConfig, MistralForCausalLM

from hfpaged import demo_model

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
MOST_WORKERS = 4  # each holds torch and the demo model, about 1.5 GB


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `pytest -n auto` means here."""
    return min(MOST_WORKERS, os.cpu_count() or 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What all modules have made stays to the end: no collection looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """Small models lose time on many threads, and workers beside each other have one core each."""
    torch.set_num_threads(1 if IS_WORKER else min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session", autouse=True)
def compilations_told() -> None:
    """In a new environment whichever test comes first would find that line in its log."""
    cpu_threads._told = True


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models: their matrices are done before a second thread has woken up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> demo_model.Loaded:
    """SmolLM2-135M-Instruct in float32 on the CPU; whoever patches the model must unpatch it."""
    # The folder above a worker's own is common to all of them: one fetches the model, the others wait for it.
    common = tmp_path_factory.getbasetemp().parent if IS_WORKER else tmp_path_factory.getbasetemp()
    with FileLock(common / "demo-model.lock"):
        demo_model.path()
    model, tokenizer = demo_model.load()
    return model.eval(), tokenizer


@pytest.fixture(scope="session")
def warm() -> str:
    """The path of a Python that has its imports when it starts."""
    return forked.python()


DEMO_WINDOW = 256


@pytest.fixture(scope="session")
def demo_mistral(demo) -> demo_model.Loaded:
    """The demo model's own tensors as those of a Mistral, whose layers see 256 tokens."""
    llama, tokenizer = demo
    sizes = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings pad_token_id bos_token_id "
        "eos_token_id"
    )
    given = {name: getattr(llama.config, name) for name in sizes.split()}
    config = MistralConfig(**given, sliding_window=DEMO_WINDOW)
    with torch.device("meta"):
        model = MistralForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no state dict
    model.load_state_dict(llama.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = llama.generation_config
    return model.eval(), tokenizer
