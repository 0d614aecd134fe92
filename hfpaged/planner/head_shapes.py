"""Heads and their sizes, as a layer hands its keys and values to the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.fields import Fields, missing
from hfpaged.planner.layer_rules import HYBRID_SLIDING, SLIDING


class HeadShape(NamedTuple):
    """Of one layer: heads, and numbers of one key and one value; `latent` both together where they are a latent."""

    heads: int
    key_dim: int
    value_dim: int
    latent: int | None = None


def head_shape(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """The shape in layer number `layer`. Raises InvalidConfigError where the config does not tell it."""
    own = fields.of_layer(layer)
    if rule := _RULES.get(fields.model_type):
        return rule(own, layer, layer_type)
    if own.get("kv_lora_rank") is not None:
        return _latent(own)
    if layer_type in (SLIDING, HYBRID_SLIDING) and own.get("swa_num_key_value_heads") is not None:
        dim = own.count("swa_head_dim", head_dim(own))
        return HeadShape(own.count("swa_num_key_value_heads"), dim, dim)
    dim = head_dim(own)
    return HeadShape(_kv_heads(own, layer), dim, dim)


def head_dim(fields: Fields) -> int:
    """The size of a head of keys. Raises InvalidConfigError."""
    given = fields.get("head_dim")
    if given is not None:
        return fields.count("head_dim")
    if fields.get("hidden_size") is None or fields.get("num_attention_heads") is None:
        raise missing(fields, ["head_dim", "hidden_size", "num_attention_heads"])
    return fields.count("hidden_size") // fields.count("num_attention_heads")


def attention_heads(fields: Fields) -> int:
    """Heads of queries, the most of any layer where layers differ; 0 where a config has none."""
    if fields.model_type == "jetmoe":
        return fields.count("num_key_value_heads") * fields.count("num_experts_per_tok")
    heads: Any = fields.get("num_attention_heads", 0)
    return max(heads) if isinstance(heads, list) else int(heads)


def _latent(fields: Fields) -> HeadShape:
    """Multi-head latent attention: the latent and the rotary part of the keys, each as one head."""
    rank, rotary = fields.count("kv_lora_rank"), int(fields.get("qk_rope_head_dim", 0))
    return HeadShape(1, rank, rotary, rank + rotary)


def _kv_heads(fields: Fields, layer: int) -> int:
    """Grouped-query, multi-query or plain attention, by whichever of their fields a config has."""
    given = fields.get("num_key_value_heads")
    if isinstance(given, list) and layer < len(given) and isinstance(given[layer], int):
        return int(given[layer])
    if given is not None:
        return fields.count("num_key_value_heads")
    nested = fields.get("attn_config")  # MPT and DBRX
    if isinstance(nested, dict) and nested.get("kv_n_heads"):
        return int(nested["kv_n_heads"])
    return fields.count("num_attention_heads")


def _multi_query(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    heads = 1 if fields.get("multi_query", True) else fields.count("num_attention_heads")
    return HeadShape(heads, head_dim(fields), head_dim(fields))


def _falcon(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """The new architecture groups its heads, but spreads keys and values to all heads before they reach the cache."""
    if fields.get("new_decoder_architecture"):
        return HeadShape(fields.count("num_attention_heads"), head_dim(fields), head_dim(fields))
    return _multi_query(fields, layer, layer_type)


def _dbrx(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    heads = (fields.get("attn_config") or {}).get("kv_n_heads", 1)
    return HeadShape(int(heads), head_dim(fields), head_dim(fields))


def _jetmoe(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    return HeadShape(fields.count("num_key_value_heads"), head_dim(fields), head_dim(fields))


def _mimo(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """Sliding layers have twice the KV heads, and values another size than keys."""
    heads = fields.count("num_key_value_heads") * (2 if layer_type == SLIDING else 1)
    return HeadShape(heads, head_dim(fields), fields.count("v_head_dim"))


def _whole_width(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """The head size is the width by heads, whatever else the config says."""
    dim = fields.count("hidden_size") // fields.count("num_attention_heads")
    return HeadShape(_kv_heads(fields, layer), dim, dim)


def _zamba(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """Attention sees the layer's input beside that of the model: twice the width."""
    dim = 2 * fields.count("hidden_size") // fields.count("num_attention_heads")
    given = fields.get("attention_head_dim") if fields.model_type == "zamba" else None
    return HeadShape(_kv_heads(fields, layer), given or dim, given or dim)


def _gemma4(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """Layers of full attention have larger heads, and some models fewer of them."""
    if "per_layer_config" in fields.values or layer_type == SLIDING:
        return HeadShape(_kv_heads(fields, layer), head_dim(fields), head_dim(fields))
    dim, heads = fields.count("global_head_dim", 512), fields.values.get("num_global_key_value_heads")
    if heads is None or not fields.get("attention_k_eq_v", True):
        heads = _kv_heads(fields, layer)
    return HeadShape(int(heads), dim, dim)


def _dots3(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """Sliding layers have a latent of their own, of which released configs say the sizes behind `swa_`."""
    if layer_type != SLIDING or "per_layer_config" in fields.values:
        return _latent(fields)
    rank, dim = fields.count("swa_kv_lora_rank", 1024), fields.count("swa_head_dim", 256)
    rotary = fields.count("swa_qk_rope_head_dim", dim - fields.count("swa_qk_nope_head_dim", 192))
    return HeadShape(1, rank, rotary, rank + rotary)


def _mistral_large4(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """Layers without rotary positions have no rotary part."""
    rotary = fields.get("no_rope_layers")
    has_rope = rotary[layer] if rotary else (layer + 1) % fields.get("no_rope_layer_interval", 4) != 0
    latent = _latent(fields)
    return latent if has_rope else HeadShape(1, latent.key_dim, 0, latent.key_dim)


def _chatglm(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    heads = fields.count("multi_query_group_num") if fields.get("multi_query_attention") else attention_heads(fields)
    return HeadShape(heads, head_dim(fields), head_dim(fields))


def _deci(fields: Fields, layer: int, layer_type: str) -> HeadShape:
    """Heads of each layer as a search has found them; see `layer_types` for those without attention."""
    blocks = fields.get("block_configs")
    if not isinstance(blocks, list) or layer >= len(blocks):
        heads: Any = fields.get("num_key_value_heads_per_layer")
        if not isinstance(heads, list) or layer >= len(heads):
            raise InvalidConfigError(
                f"the config of model type {fields.model_type!r} has no entry for layer {layer} in block_configs or "
                "num_key_value_heads_per_layer, where plan looks for the heads of its layers"
            )
        return HeadShape(int(heads[layer]), head_dim(fields), head_dim(fields))
    in_group = (blocks[layer].get("attention") or {}).get("n_heads_in_group")
    return HeadShape(attention_heads(fields) // in_group if in_group else 0, head_dim(fields), head_dim(fields))


_RULES: dict[str, Callable[[Fields, int, str], HeadShape]] = {
    "falcon": _falcon, "gpt_bigcode": _multi_query, "dbrx": _dbrx, "jetmoe": _jetmoe, "mimo_v2_flash": _mimo,
    "dots3_note_text": _dots3, "mistral_large4_text": _mistral_large4,
    "cohere2": _whole_width, "cohere_compass_text": _whole_width, "recurrent_gemma": _whole_width,
    "zamba": _zamba, "zamba2": _zamba, "gemma4_text": _gemma4, "gemma4_unified_text": _gemma4,
    "diffusion_gemma_text": _gemma4,
    "chatglm": _chatglm, "deci": _deci, "nemotron-nas": _deci,
}  # fmt: skip
