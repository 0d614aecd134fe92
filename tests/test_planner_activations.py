"""The estimate of a step's activations, against what torch allocates and what a batcher finds."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hfpaged.planner.activations import activation_bytes
from hfpaged.planner.model_reading import facts_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 128
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1000}
MODELS = {
    "grouped heads": {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 704},
    "a head for each": {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 704},
    "a wide MLP": {"model_type": "gemma2", "head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 2048},
    "wide heads": {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 256},
    "no gate": {"model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 2, "activation_function": "gelu_new"},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4, "intermediate_size": 512},
}


class LiveBytes(TorchDispatchMode):
    """The most bytes that results of operations held at once, beside the model's own."""

    def __init__(self, model):
        super().__init__()
        own = [*model.parameters(), *model.buffers()]
        self.live, self.peak, self.seen = 0, 0, {tensor.untyped_storage().data_ptr() for tensor in own}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage):
        key = storage.data_ptr()
        if key and key not in self.seen:
            self.seen.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.gone, key, storage.nbytes())

    def gone(self, key, size):
        self.seen.discard(key)
        self.live -= size


def built(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SIZES | MODELS[name]))).eval()


@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_near_what_torch_holds_at_its_largest_moment(name):
    model = built(name)
    with torch.no_grad(), LiveBytes(model) as mode:
        model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=False, logits_to_keep=1)
    facts = facts_of(model.config.to_dict(), name)
    assert 0.7 < activation_bytes(facts, TOKENS, "float32", rows=1) / mode.peak < 1.4


def test_logits_of_many_rows_outweigh_a_small_model():
    facts = facts_of(SIZES | MODELS["grouped heads"] | {"vocab_size": 128_000}, "a model")
    assert activation_bytes(facts, 512, "bfloat16", rows=512) == 512 * 128_000 * (2 + 8)
    assert activation_bytes(facts, 4, "bfloat16", rows=512) == 4 * 128_000 * (2 + 8)


def test_tensor_parallel_ranks_hold_their_share_of_the_inner_tensors():
    facts = facts_of(SIZES | MODELS["a wide MLP"], "a model")
    whole, half = (activation_bytes(facts, TOKENS, "float16", rows=1, tp=tp) for tp in (1, 2))
    assert whole - half == TOKENS * 2 * 3 * 1024


SIZED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hfpaged.engine.sizing import size_pool
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, vocab_size=1000,
    num_attention_heads=16, num_key_value_heads=4)).eval()
def forward(count):
    with torch.no_grad():
        model(torch.ones(1, count, dtype=torch.long), use_cache=False, logits_to_keep=1)
    return {}
cpu = torch.device("cpu")
print(size_pool(lambda device: 0.9, lambda: {cpu: 1}, forward, 512, 1).activations)
"""


def test_the_estimate_is_within_a_factor_of_four_of_what_sizing_a_pool_finds():
    """In a process of its own: in an old one the allocator has memory that it hands out again unseen."""
    done = subprocess.run([sys.executable, "-c", SIZED], capture_output=True, text=True, timeout=120, check=True)
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 1000}
    estimate = activation_bytes(facts_of(config, "a model"), 512, "float32", rows=1)
    assert 0.25 < estimate / int(done.stdout.splitlines()[-1]) < 4
