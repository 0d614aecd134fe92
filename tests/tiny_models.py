"""Tiny random models of many architectures: large weights, so that the next token is seldom a close call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

VOCAB = 101
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # each names its sizes its own way

# Name of the case -> (model type, what its config is made of).
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", PLAIN),
    "llama_mqa": ("llama", PLAIN | {"num_key_value_heads": 1}),
    "llama_mha": ("llama", PLAIN | {"num_key_value_heads": 4}),
    "mistral": ("mistral", PLAIN | {"sliding_window": 24}),
    "qwen2": ("qwen2", PLAIN),
    "qwen3": ("qwen3", PLAIN | {"num_hidden_layers": 3}),
    "gpt_neox": ("gpt_neox", PLAIN | {"rotary_pct": 0.5}),
    "phi3": ("phi3", PLAIN | {"sliding_window": None}),
    "gpt2": ("gpt2", OLD | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "opt": (
        "opt",
        OLD
        | {
            "hidden_size": 48,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 48,
        }
        | {"max_position_embeddings": 256},
    ),
    "falcon": (
        "falcon",
        OLD
        | {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
        | {"new_decoder_architecture": True, "alibi": False, "max_position_embeddings": 256},
    ),
    "gemma2": (
        "gemma2",
        PLAIN
        | {"num_hidden_layers": 4, "sliding_window": 12, "query_pre_attn_scalar": 12}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "mpt": ("mpt", OLD | {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "expansion_ratio": 2}),
    "bloom": ("bloom", OLD | {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "gpt_oss": (
        "gpt_oss",
        PLAIN
        | {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {key: value for key, value in PLAIN.items() if key != "head_dim"}
        | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
    ),
}

# Their own attention code, which no registry reaches: a PagedCache gives them dense views.
OWN_ATTENTION = ("falcon", "mpt", "bloom")
# Latent keys and values, which the model expands after the cache: dense views too.
LATENT = ("deepseek_v3",)


def make(name: str, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A fresh model of the table, the same weights each time; `changes` go to its config."""
    model_type, sizes = TABLE[name]
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, **({} if attention is None else {"attn_implementation": attention})
    )
    return with_large_weights(model)


@functools.cache
def shared(name: str, attention: str | None = None) -> PreTrainedModel:
    """The same, made once: whoever patches it must unpatch it."""
    return make(name, attention)


def make_t5() -> PreTrainedModel:
    """An encoder-decoder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return with_large_weights(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)))


def with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=generator)
            elif name.endswith("sinks"):
                parameter.normal_(std=1.0, generator=generator)
    model.generation_config.eos_token_id = None  # rows go on to max_new_tokens unless a test says otherwise
    return model.eval().requires_grad_(False)


def prompts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, left-padded to the longest: what a tokenizer would give."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length], mask[row, : max(lengths) - length] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
