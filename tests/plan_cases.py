"""What tests of `hfpaged plan` ask: models that everybody knows by their sizes, on round machines."""

from __future__ import annotations

from typing import Any

from hfpaged.planner.case import Case, Choices, Machine, Workload
from hfpaged.planner.model_facts import LayerKV, ModelFacts
from hfpaged.planner.sizes import Sizes

GB, GIB = 10**9, 1 << 30


def llama(kv_heads: int = 32, **changes: Any) -> ModelFacts:
    """A model of 7B parameters: 32 layers, hidden 4096, float16; with 8 KV heads the layers of Llama-3-8B."""
    layer = LayerKV("full", kv_heads, 128, 128)
    sizes = {"attention_heads": 32, "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
    return ModelFacts(**{"name": "llama", "model_type": "llama", "dtype": "float16", "layers": (layer,) * 32, **sizes,
                         "max_positions": 8192, **changes})  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    """The config.json of such a model."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
        "torch_dtype": "float16", "max_position_embeddings": 8192, **changes,
    }  # fmt: skip


def case(
    facts: ModelFacts | None = None, *, memory: int = 80 * GB, weights: int = 14 * GB, overhead: int = 0,
    activations: int = 0, is_cpu: bool = False, in_use: int = 0, prompt: int = 512, output: int = 1024,
    context: int | None = None, concurrency: int | None = None, shared_prefix: int = 0, encoder: int = 0,
    **choices: Any,
) -> Case:  # fmt: skip
    """80 GB, 14 GB of weights and nothing else, requests of 512 + 1024 tokens."""
    workload = Workload(
        prompt=prompt, output=output, context=context or prompt + output, concurrency=concurrency,
        shared_prefix=shared_prefix, encoder=encoder,
    )  # fmt: skip
    machine = Machine("a device", memory, overhead=overhead, in_use=in_use, is_cpu=is_cpu)
    return Case(Sizes(facts or llama(), weights, activations), workload, machine, Choices(**choices))
