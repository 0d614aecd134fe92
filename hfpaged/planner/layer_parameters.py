"""The weights of one layer, by its parts: attention, MLP, routed experts."""

from __future__ import annotations

from hfpaged.planner.config_numbers import Config, by_layer, flag, number
from hfpaged.planner.model_facts import LayerKV, ModelFacts
from hfpaged.planner.parameter_families import ONE_SHARED_EXPERT, OUTPUT_GATE, TWO_MATRICES

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts")
EXPERT_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_dim")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_INNER = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")


def family_of(facts: ModelFacts) -> str:
    """The model type of the part that generates."""
    return str(facts.config.get("model_type") or facts.model_type)


def attention(facts: ModelFacts, layer: LayerKV) -> int:
    """The four matrices: of queries, keys, values and the output. A layer that borrows keys has no K and V."""
    config, hidden = facts.config, facts.hidden_size
    if number(config, "kv_lora_rank"):
        return _latent_attention(config, hidden, facts.attention_heads)
    heads = facts.attention_heads
    if family_of(facts) == "jetmoe":
        return _mixture_of_attention(facts, layer)
    key = layer.key_dim or number(config, "head_dim", default=hidden // max(heads, 1))
    value = layer.value_dim or key
    own = 0 if layer.kind == "borrowed" else layer.kv_heads * (key + value)
    gate = heads * value if family_of(facts) in OUTPUT_GATE else 0
    return hidden * (heads * (key + value) + own + gate)


def _mixture_of_attention(facts: ModelFacts, layer: LayerKV) -> int:
    """JetMoE (arXiv 2404.07413): queries and output of each expert, keys and values shared."""
    width = layer.kv_heads * layer.key_dim
    return facts.hidden_size * width * 2 * (1 + num_experts(facts.config))


def _latent_attention(config: Config, hidden: int, heads: int) -> int:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    rope, value = number(config, "qk_rope_head_dim"), number(config, "v_head_dim")
    plain, rank = number(config, "qk_nope_head_dim"), number(config, "kv_lora_rank")
    queries = heads * (plain + rope)
    low = number(config, "q_lora_rank")
    query = low * (hidden + queries) if low else hidden * queries
    return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden


def matrices(config: Config, model_type: str) -> int:
    """Of an MLP: up and down, and a gate in most families. T5 and its kin say so."""
    if "feed_forward_proj" in config:
        return 3 if str(config["feed_forward_proj"]).startswith("gated") else 2
    return 2 if model_type in TWO_MATRICES else 3


def num_experts(config: Config) -> int:
    return number(config, *EXPERTS)


def is_sparse(config: Config, layer: int) -> bool:
    """Whether `layer` has routed experts in place of the one MLP."""
    if num_experts(config) < 2 or config.get("is_moe") is False:
        return False
    kind = by_layer(config, "mlp_layer_types", layer)
    if kind is not None:
        return bool(kind != "dense")
    if (often := by_layer(config, "moe_layer_freq", layer)) is not None:
        return bool(often)
    if isinstance(config.get("moe_layers"), list):
        return layer in config["moe_layers"]
    if layer in (config.get("mlp_only_layers") or []):
        return False
    first = number(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    return layer >= first and _in_turn(config, layer)


def _in_turn(config: Config, layer: int) -> bool:
    """Families whose every second or third layer is sparse count from 1, or from an offset."""
    if period := number(config, "expert_layer_period"):
        return layer % period == number(config, "expert_layer_offset")
    step = number(config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    return (layer + 1) % max(step, 1) == 0


def experts(facts: ModelFacts) -> int:
    """All routed experts of one layer."""
    inner = number(facts.config, *EXPERT_INNER, default=facts.intermediate_size)
    return num_experts(facts.config) * matrices(facts.config, family_of(facts)) * facts.hidden_size * inner


def beside_experts(facts: ModelFacts) -> int:
    """The router of one layer, and the experts that every token takes."""
    config = facts.config
    inner = number(config, *SHARED_INNER)
    if not inner:
        shared = number(config, *SHARED, default=1 if family_of(facts) in ONE_SHARED_EXPERT else 0)
        inner = shared * number(config, *EXPERT_INNER, default=facts.intermediate_size)
    matrix = facts.hidden_size * inner
    return matrices(config, family_of(facts)) * matrix + num_experts(config) * facts.hidden_size


def dense_mlp(facts: ModelFacts, layer: int) -> int:
    """The one MLP of a layer without experts."""
    inner = by_layer(facts.config, "intermediate_size", layer, facts.intermediate_size) or 4 * facts.hidden_size
    inner = _rounded(facts.config, family_of(facts), int(inner))
    return matrices(facts.config, family_of(facts)) * facts.hidden_size * inner


def _rounded(config: Config, model_type: str, inner: int) -> int:
    """The size within an MLP where families make another one of what their config says."""
    if model_type == "recurrent_gemma":
        return inner // 2
    if model_type.startswith("lfm2") and flag(config, "block_auto_adjust_ff_dim"):
        step = number(config, "block_multiple_of", default=256)
        return -(-int(2 * inner / 3 * float(config.get("block_ffn_dim_multiplier", 1))) // step) * step
    return number(config, "intermediate_size_mlp", default=inner)
