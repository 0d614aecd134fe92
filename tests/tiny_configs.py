"""Tiny configs of any model type: the default config of its class, with every size that is known by name made small."""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB = 97
LAYERS = 4
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 48

# The first pattern that a field's whole name matches gives its value; fields that are None or of no such name stay.
SIZES: list[tuple[str, Any]] = [
    (r".*vocab_size.*", VOCAB),
    (r"pad_token_id", 0),
    (r"(bos|decoder_start)_token_id", 1),
    (r"eos_token_id|sep_token_id|forced_eos_token_id", 2),
    (r"(qk_)?rope_head_dim|qk_nope_head_dim", 8),
    (r"qk_head_dim|index_head_dim", 16),
    (r"v_head_dim", 12),
    (r"(q|kv|o)_lora_rank", 16),
    (r"index_n_heads", HEADS),
    (r"index_topk", 4),
    (r"(first_k_dense_replace|num_nextn_predict_layers|n_group|topk_group|num_expert_group|n_shared_experts)", 1),
    (r".*(num_(local_|routed_)?experts|n_routed_experts|num_local_experts)", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r".*(moe|expert|shared|experts).*_(intermediate|hidden)_size", 16),
    (r"mamba_n_heads|n_mamba_heads|mamba_num_heads", 2 * HIDDEN // 8),
    (r".*num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads", KV_HEADS),
    (r".*(attention_heads|num_heads|n_heads?)|linear_num_value_heads", HEADS),
    (r"(.*_)?head_dim|kv_channels|dim_head|d_kv|d_head|mamba_d_head|mamba_headdim", HEAD_DIM),
    (
        r"mamba_d_state|(ssm_)?state_size|mamba_dt_rank|time_step_rank|laurel_rank|adapter_rank|hidden_size_per_layer_input",
        8,
    ),
    (r"mamba_n_?groups|n_groups", 1),
    (
        r".*(hidden_size|n_embd|d_model|embedding_size|embed_dim|emb_dim|embedding_dim|word_embed_proj_dim)(_global)?",
        HIDDEN,
    ),
    (r".*(intermediate_size|ffn_dim|d_ff|dff|dim_ff|d_inner|mlp_dim|ffn_hidden_size)(_mlp)?", INNER),
    (r"num_layers|n_layers?|(num_)?(encoder|decoder|hidden)_layers|depth|num_(encoder|decoder)_layers", LAYERS),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|model_max_length", 256),
    (r"sliding_window(_size)?|attention_chunk_size|window_size|local_attention_window_len", 6),
]
TOKENS = re.compile(r".*_token_(id|index)|bo[ai]_token_.*|eo[ai]_token_.*")
COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers")


def tiny_config(model_type: str, overrides: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A config of this type for a model of some 10,000 weights. `overrides`: fields that need another value, where
    `...` leaves the default alone; of a sub-config, a dict of its own.
    """
    overrides = overrides or {}
    base = overrides.get("BASE", {})
    return CONFIG_MAPPING[model_type](**_fields(CONFIG_MAPPING[model_type](**base), overrides))


def _fields(default: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    small: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, PreTrainedConfig):
            changes = overrides.get(name, {})
            small[name] = changes if changes is None else _sub_config(value, changes)
        elif (size := _size(name, value)) is not None:
            small[name] = size
    if "kv_lora_rank" in plain and "num_key_value_heads" in plain:
        small["num_key_value_heads"] = HEADS  # of latent attention every head has keys of its own
    small |= _per_layer(default, plain, small | overrides)
    if "is_decoder" in plain or plain.get("is_encoder_decoder"):  # those that can be either
        small |= {"is_decoder": True, "is_encoder_decoder": False}
    own = {name: value for name, value in overrides.items() if not isinstance(small.get(name), PreTrainedConfig)}
    small |= own
    return {name: value for name, value in small.items() if value is not ... and name != "BASE"}


def _sub_config(value: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    return type(value)(**_fields(value, overrides))


def _size(name: str, value: Any) -> Any:
    if value is None and name in ("head_dim", "num_key_value_heads"):
        value = 1  # some classes leave them out and need them all the same
    if name == "use_cache":
        return True
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size
    if TOKENS.fullmatch(name) and value >= VOCAB:
        return VOCAB - 1 - value % 8
    return None


def _per_layer(default: PreTrainedConfig, plain: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer keep as many entries as there are layers now, each kind among them."""
    count = next((plain[name] for name in COUNTS if isinstance(plain.get(name), int)), None)
    wanted = next((small[name] for name in COUNTS if isinstance(small.get(name), int)), None)
    lists = {n: v for n, v in plain.items() if isinstance(v, (list, tuple)) and count and len(v) == count}
    if not lists or not count or not wanted:
        return {}
    chosen = _chosen_layers(list(zip(*lists.values(), strict=True)), wanted)
    return {name: [value[i] for i in chosen] for name, value in lists.items()}


def _chosen_layers(kinds: list[tuple[Any, ...]], wanted: int) -> list[int]:
    """The first layers of each kind, in turns, in the order of the model."""
    places: dict[str, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(repr(kind), []).append(place)
    chosen: list[int] = []
    turn = 0
    while len(chosen) < min(wanted, len(kinds)):
        chosen += [group[turn] for group in places.values() if turn < len(group)]
        turn += 1
    return sorted(chosen[:wanted])
