"""Every causal model type of transformers, built tiny: what its config needs beyond the rules of `tiny_configs`."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from tiny_configs import HIDDEN, VOCAB, tiny_config
from tiny_models import with_large_weights
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpaged import model_classes

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
WINDOWED_6 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
WINDOWED_QWEN = WINDOWED | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
GEMMA_4 = WINDOWED | {"global_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
MUSIC = {"decoder": {"pad_token_id": VOCAB, "bos_token_id": VOCAB}}  # behind the vocabulary, as the real ones
ROPE = {"rope_type": "default", "rope_theta": 1e4}
HALF_ROPE = ROPE | {"partial_rotary_factor": 0.5}
SPARSE_QWEN = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_embed_dim": HIDDEN,
    "ngram_vocab_size_base": 50,
    "hc_lowrank": 8,
}
DOTS_3 = {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "per_layer_config": {i: {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16} for i in (1, 3)},
    "head_dim": 16,
    "rope_parameters": {"indexed_attention": HALF_ROPE, "sliding_attention": HALF_ROPE},
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": WINDOWED | {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": WINDOWED_6 | {"n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "dots1": WINDOWED | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": DOTS_3,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN, "num_key_value_heads": 4}
        | {"downsample_hidden_size": 8, "feature_size": 16},
    },
    "dots3_note_text": DOTS_3,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n": {"text_config": WINDOWED | {"num_kv_shared_layers": 0}},
    "gemma3n_text": WINDOWED_6
    | {"num_kv_shared_layers": 2, "altup_num_inputs": 2}
    | {"intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4": {"text_config": GEMMA_4},
    "gemma4_assistant": {
        "BASE": {
            "text_config": {"model_type": "gemma4_text"}
            | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        },
        "text_config": GEMMA_4
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4},
    },
    "gemma4_text": GEMMA_4 | WINDOWED_6 | {"num_kv_shared_layers": 2},
    "gemma4_unified": {"text_config": GEMMA_4},
    "gemma4_unified_text": GEMMA_4,
    "got_ocr2": {"vision_config": {"output_channels": 8, "image_size": 64}},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": MAMBA | LINEAR,
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "loop_num_passes": 2}
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC,
    "phi4_multimodal": {
        "audio_config": {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}
        | {"num_blocks": 1, "num_hidden_layers": 1},
        "vision_config": {"image_size": 28, "crop_size": 28},
    },
    "qwen2": WINDOWED_QWEN,
    "qwen2_moe": WINDOWED_QWEN,
    "qwen3": WINDOWED_QWEN,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 6},
    "qwen4_exp": {"text_config": SPARSE_QWEN},
    "qwen4_exp_text": SPARSE_QWEN,
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"qk_dim_factor": 2.0, "v_dim_factor": 2.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1, 3]}
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Sparse layers choose a few blocks of keys.
OVERRIDES["minimax_m3_vl_text"] = {
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "rotary_dim": 4,
}


def config_of(model_type: str) -> PreTrainedConfig:
    """The tiny config, as `config.json` would have it: of the whole, where the model is a part."""
    return tiny_config(model_type, OVERRIDES.get(model_type))


def build(model_type: str) -> PreTrainedModel:
    """The tiny random model that belongs to this model type, the same weights each time."""
    config = config_of(model_type)
    model_class = model_classes.model_class_of(config)
    assert model_class is not None
    torch.manual_seed(0)
    with _without_timm() if model_type == "gemma3n" else contextlib.nullcontext():
        model = with_large_weights(model_classes.build(config, model_class))
    if model_type in ("musicgen", "musicgen_melody"):
        model.generation_config.decoder_start_token_id = VOCAB
    return model


def _without_timm() -> Any:
    """The vision tower of Gemma 3n is one of timm's, a library that the tests do without: no test shows it pictures."""
    from_config = AutoModel.from_config

    def made(config: Any, **kwargs: Any) -> Any:
        return nn.Identity() if config.model_type == "gemma3n_vision" else from_config(config, **kwargs)

    return mock.patch.object(AutoModel, "from_config", made)
