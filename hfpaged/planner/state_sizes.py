"""What layers keep of a sequence beside keys and values, or in their place: states of convolutions, of state space
models and of linear attention, whose size does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hfpaged.planner.fields import Fields
from hfpaged.planner.head_shapes import head_dim, head_shape
from hfpaged.planner.layer_rules import CONV, HYBRID, HYBRID_SLIDING, LINEAR

_FLOAT32 = 4


class State(NamedTuple):
    """`numbers` in the model's dtype, and `float32` numbers in float32 whatever the dtype of the model is."""

    numbers: int = 0
    float32: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.float32 * _FLOAT32


def state_of(fields: Fields, layer: int, layer_type: str) -> State | None:
    """The state of one layer; None where this family is not known to have layers of such a type."""
    if layer_type not in (LINEAR, CONV, HYBRID, HYBRID_SLIDING):
        return State()
    rule = _RULES.get(fields.model_type)
    return None if rule is None else rule(fields, layer, layer_type)


def _mamba2(
    width: Callable[[Fields], int], groups: str, state: str, kernel: str
) -> Callable[[Fields, int, str], State]:
    """Mamba 2 (arXiv 2405.21060): the last inputs of the convolution, and a matrix for each head. `width` in all
    heads; the other arguments are names of fields.
    """

    def rule(fields: Fields, layer: int, layer_type: str) -> State:
        inner, size = width(fields), fields.count(state)
        channels = inner + 2 * fields.count(groups) * size
        return State(channels * fields.count(kernel), inner * size)

    return rule


def _mamba1(fields: Fields, layer: int, layer_type: str) -> State:
    """Mamba (arXiv 2312.00752), with Jamba's names."""
    inner = _expanded(fields)
    return State(inner * fields.count("mamba_d_conv"), inner * fields.count("mamba_d_state"))


def _delta_net(fields: Fields, layer: int, layer_type: str) -> State:
    """Gated DeltaNet (arXiv 2412.06464): a convolution over queries, keys and values, a matrix for each value head."""
    heads = fields.get("num_attention_heads")
    key_heads, value_heads = fields.count("linear_num_key_heads", heads), fields.count("linear_num_value_heads", heads)
    key_dim = fields.count("linear_key_head_dim", int(0.75 * fields.count("hidden_size") / key_heads))
    value_dim = fields.count("linear_value_head_dim", 2 * key_dim)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return State(channels * fields.count("linear_conv_kernel_dim"), value_heads * key_dim * value_dim)


def _kimi_delta(fields: Fields, layer: int, layer_type: str) -> State:
    """Kimi Delta Attention (arXiv 2510.26692), with queries, keys and values of one size."""
    own = fields.get("linear_attn_config") or {}
    heads = own.get("num_heads") or fields.count("linear_num_heads", fields.get("num_attention_heads"))
    dim = own.get("head_dim") or fields.count("linear_head_dim", fields.get("head_dim"))
    kernel = own.get("short_conv_kernel_size") or fields.count(
        "linear_conv_kernel_dim", fields.get("short_conv_kernel_size")
    )
    return State(3 * heads * dim * kernel, heads * dim * dim)


def _lfm2(fields: Fields, layer: int, layer_type: str) -> State:
    return State(fields.count("hidden_size") * fields.count("conv_L_cache"))


def _inkling(fields: Fields, layer: int, layer_type: str) -> State:
    """Four short convolutions: over keys, values, and twice over the width of the model; kept in float32."""
    heads, key_dim, value_dim, _ = head_shape(fields, layer, layer_type)
    channels = heads * (key_dim + value_dim) + 2 * fields.count("hidden_size")
    return State(float32=channels * fields.count("conv_kernel_size"))


def _zaya(fields: Fields, layer: int, layer_type: str) -> State:
    """The last queries and keys before two convolutions, and half of the last value."""
    heads, dim = fields.count("num_key_value_heads"), head_dim(fields)
    kernel = fields.count("cca_time0") + fields.count("cca_time1") - 2
    return State((fields.count("num_attention_heads") + heads) * dim * kernel + heads * dim // 2)


def _recurrent_gemma(fields: Fields, layer: int, layer_type: str) -> State:
    """Its layers keep their states themselves, not in the cache."""
    return State()


def _expanded(fields: Fields) -> int:
    return fields.count("mamba_expand") * fields.count("hidden_size")


def _falcon_h1_width(fields: Fields) -> int:
    return fields.get("mamba_d_ssm") or _expanded(fields)


def _nemotron_width(fields: Fields) -> int:
    return fields.count("mamba_num_heads") * fields.count("mamba_head_dim")


_BAMBA = _mamba2(_expanded, "mamba_n_groups", "mamba_d_state", "mamba_d_conv")

_RULES: dict[str, Callable[[Fields, int, str], State]] = {
    "bamba": _BAMBA, "granitemoehybrid": _BAMBA,
    "falcon_h1": _mamba2(_falcon_h1_width, "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    "zamba2": _mamba2(_expanded, "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    "nemotron_h": _mamba2(_nemotron_width, "n_groups", "ssm_state_size", "conv_kernel"),
    "jamba": _mamba1, "zamba": _mamba1,
    "qwen3_next": _delta_net, "qwen3_5_text": _delta_net, "qwen3_5_moe_text": _delta_net, "olmo_hybrid": _delta_net,
    "qwen4_exp_text": _delta_net, "lara_mini": _delta_net,
    "kimi_linear": _kimi_delta, "bailing_hybrid": _kimi_delta,
    "lfm2": _lfm2, "lfm2_moe": _lfm2, "lfm3": _lfm2,
    "inkling_text": _inkling, "inkling2_text": _inkling, "inkling2_loop_text": _inkling,
    "zaya": _zaya, "recurrent_gemma": _recurrent_gemma,
}  # fmt: skip
