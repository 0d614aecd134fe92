"""The weights of layers that keep a state in place of keys and values."""

from __future__ import annotations

import math

from hfpaged.planner.config_numbers import Config, number
from hfpaged.planner.model_facts import ModelFacts

HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
HEAD_DIM = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
STATE = ("mamba_d_state", "ssm_state_size", "state_size")
GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
CONV = ("mamba_d_conv", "conv_kernel", "d_conv", "linear_conv_kernel_dim")


def state_layer(facts: ModelFacts) -> tuple[int, int]:
    """Numbers of weights of one layer: those in matrices, and others. 0 for kinds that are unknown here."""
    config, hidden, family = facts.config, facts.hidden_size, str(facts.config.get("model_type") or facts.model_type)
    if number(config, "linear_num_value_heads"):
        return _gated_delta_net(config, hidden)
    if family.startswith("lfm"):
        return 4 * hidden**2, 3 * hidden
    if family in _OWN:
        return _OWN[family](facts)
    if _rank(config, hidden) and not number(config, "mamba_headdim"):
        return _mamba(config, hidden)
    return _mamba_2(config, hidden) if number(config, *STATE) else (0, 0)


def _gated_delta_net(config: Config, hidden: int) -> tuple[int, int]:
    """Gated DeltaNet (arXiv 2412.06464), as Qwen3-Next has it: queries, keys, values and a gate, and two numbers for
    each head.
    """
    heads = number(config, "linear_num_value_heads")
    keys = number(config, "linear_num_key_heads") * number(config, "linear_key_head_dim")
    values = heads * number(config, "linear_value_head_dim")
    return hidden * (2 * keys + 3 * values + 2 * heads), (2 * keys + values) * number(config, *CONV, default=4)


def _rank(config: Config, hidden: int) -> int:
    """Of the step size of the first Mamba, None and "auto" being a sixteenth of the hidden size."""
    if "mamba_dt_rank" not in config and "time_step_rank" not in config:
        return 0
    return number(config, "mamba_dt_rank", "time_step_rank", default=math.ceil(hidden / 16))


def _mamba(config: Config, hidden: int) -> tuple[int, int]:
    """Mamba (arXiv 2312.00752, figure 3)."""
    inner = hidden * number(config, "mamba_expand", "expand", default=2)
    rank, state = _rank(config, hidden), number(config, *STATE, default=16)
    matrices = 3 * hidden * inner + inner * (2 * rank + 2 * state)
    return matrices, inner * (state + 3 + number(config, *CONV, default=4))


def _mamba_2(config: Config, hidden: int) -> tuple[int, int]:
    """Mamba-2 (arXiv 2405.21060, section 7)."""
    heads = number(config, *HEADS)
    inner = heads * number(config, *HEAD_DIM) or number(config, "mamba_d_ssm", default=2 * hidden)
    convolved = inner + 2 * number(config, *GROUPS, default=1) * number(config, *STATE)
    return hidden * (2 * inner + convolved + heads), convolved * (1 + number(config, *CONV, default=4)) + inner


def _recurrent_gemma(facts: ModelFacts) -> tuple[int, int]:
    """Griffin (arXiv 2402.19427): three matrices, and two gates by blocks."""
    width = number(facts.config, "lru_width", default=facts.hidden_size)
    return 3 * facts.hidden_size * width, 2 * width**2 // max(facts.attention_heads, 1) + 8 * width


def _kimi(facts: ModelFacts) -> tuple[int, int]:
    """Kimi Delta Attention (arXiv 2510.26692): queries, keys, values, output, and two gates of low rank."""
    dim, heads = number(facts.config, "linear_head_dim"), number(facts.config, "linear_num_heads")
    inner = heads * dim
    return facts.hidden_size * (4 * inner + 2 * dim + heads) + 2 * dim * inner, 13 * inner


_OWN = {"kimi_linear": _kimi, "recurrent_gemma": _recurrent_gemma}
