"""config.json files of well-known models, cut to what says something of sizes, as they are on the Hugging Face hub."""

from __future__ import annotations

from typing import Any, NamedTuple


class Known(NamedTuple):
    """`token_bytes` of all layers in the dtype of the config, worked out by hand in `sum`; `windows` of the layer
    groups, and `states` bytes for a sequence.
    """

    config: dict[str, Any]
    token_bytes: int
    windows: tuple[int | None, ...]
    states: int = 0


def llama(**fields: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    return {"model_type": "llama", "torch_dtype": "bfloat16", **sizes, **fields}


KNOWN: dict[str, Known] = {
    # Touvron et al. 2023: multi-head attention
    "meta-llama/Llama-2-7b-hf": Known(
        llama(torch_dtype="float16", num_key_value_heads=32), 2 * 32 * 32 * 128 * 2, (None,)
    ),
    "meta-llama/Meta-Llama-3-8B": Known(llama(vocab_size=128256), 2 * 32 * 8 * 128 * 2, (None,)),
    # windows of 4,096 tokens in the first version, null since the second
    "mistralai/Mistral-7B-v0.1": Known(llama(model_type="mistral", sliding_window=4096), 131072, (4096,)),
    "mistralai/Mistral-7B-v0.3": Known(llama(model_type="mistral", sliding_window=None), 131072, (None,)),
    "mistralai/Mixtral-8x7B-v0.1": Known(llama(model_type="mixtral", sliding_window=None), 131072, (None,)),
    "google/gemma-2-9b": Known(
        {"model_type": "gemma2", "torch_dtype": "float32", "num_hidden_layers": 42, "hidden_size": 3584}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096},
        2 * 42 * 8 * 256 * 4, (4096, None),
    ),
    # heads and their size are left to the family's defaults: 8, 4 and 256
    "google/gemma-3-4b-it": Known(
        {"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}}
        | {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
           | {"num_hidden_layers": 34, "sliding_window": 1024}},
        2 * 34 * 4 * 256 * 2, (*[1024] * 6, None),
    ),
    # a window that the config turns off
    "Qwen/Qwen2.5-7B": Known(
        {"model_type": "qwen2", "torch_dtype": "bfloat16", "num_hidden_layers": 28, "hidden_size": 3584}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "sliding_window": 131072, "max_window_layers": 28}
        | {"use_sliding_window": False},
        2 * 28 * 4 * 128 * 2, (None,),
    ),
    # DeepSeek-AI 2024, arXiv 2412.19437: 576 numbers a layer
    "deepseek-ai/DeepSeek-V3": Known(
        {"model_type": "deepseek_v3", "torch_dtype": "bfloat16", "num_hidden_layers": 61, "hidden_size": 7168}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        61 * (512 + 64) * 2, (None,),
    ),
    "openai/gpt-oss-20b": Known(
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "head_dim": 64, "dtype": "bfloat16"}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12},
        2 * 24 * 8 * 64 * 2, (128, None),
    ),
    # three layers of four attend in chunks of 8,192 tokens
    "meta-llama/Llama-4-Scout-17B-16E": Known(
        {"model_type": "llama4", "torch_dtype": "bfloat16"}
        | {"text_config": {"model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "head_dim": 128}
           | {"num_attention_heads": 40, "num_key_value_heads": 8, "attention_chunk_size": 8192, "no_rope_layers": []}},
        2 * 48 * 8 * 128 * 2, (8192, 8192, 8192, None),
    ),
    "tiiuae/falcon-7b": Known(
        {"model_type": "falcon", "torch_dtype": "bfloat16", "num_hidden_layers": 32, "hidden_size": 4544}
        | {"num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False},
        2 * 32 * 1 * 64 * 2, (None,),
    ),
    # its 8 KV heads are spread to all 128 before transformers stores them
    "tiiuae/falcon-40b": Known(
        {"model_type": "falcon", "torch_dtype": "bfloat16", "num_hidden_layers": 60, "hidden_size": 8192}
        | {"num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
        2 * 60 * 128 * 64 * 2, (None,),
    ),
    # Lieber et al. 2024, arXiv 2403.19887: "4 GB" of keys and values for 256K tokens; 4 layers of 32 have them
    "ai21labs/Jamba-v0.1": Known(
        {"model_type": "jamba", "torch_dtype": "bfloat16", "num_hidden_layers": 32, "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4}
        | {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2},
        2 * 4 * 8 * 128 * 2, (None,), 28 * (8192 * 4 * 2 + 8192 * 16 * 4),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Known(
        {"model_type": "qwen3_next", "torch_dtype": "bfloat16", "num_hidden_layers": 48, "hidden_size": 2048}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
        | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        2 * 12 * 2 * 256 * 2, (None,), 36 * ((2 * 16 * 128 + 32 * 128) * 4 * 2 + 32 * 128 * 128 * 4),
    ),
    # 15 of 35 layers read what others keep
    "google/gemma-3n-E4B-it": Known(
        {"model_type": "gemma3n", "torch_dtype": "bfloat16"}
        | {"text_config": {"model_type": "gemma3n_text", "num_hidden_layers": 35, "hidden_size": 2048, "head_dim": 256}
           | {"num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 15, "sliding_window": 512}},
        2 * 20 * 2 * 256 * 2, (512, 512, 512, 512, None),
    ),
    "openai-community/gpt2": Known(
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024, "n_positions": 1024},
        2 * 12 * 768 * 4, (None,),
    ),
    # Code of their own on the hub, unknown to transformers: the usual fields under other names
    "THUDM/chatglm3-6b": Known(
        {"model_type": "chatglm", "torch_dtype": "float16", "num_layers": 28, "hidden_size": 4096, "kv_channels": 128}
        | {"num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2},
        2 * 28 * 2 * 128 * 2, (None,),
    ),
    "apple/OpenELM-270M": Known(
        {"model_type": "openelm", "torch_dtype": "bfloat16", "num_transformer_layers": 16, "model_dim": 1280}
        | {"head_dim": 64, "num_query_heads": [12] * 5 + [16] * 6 + [20] * 5}
        | {"num_kv_heads": [3] * 5 + [4] * 6 + [5] * 5},
        2 * (3 * 5 + 4 * 6 + 5 * 5) * 64 * 2, (None,),
    ),
}  # fmt: skip
