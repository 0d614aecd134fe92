"""Families whose layers do not follow one another as others' do, so that they are counted as a whole."""

from __future__ import annotations

from hfpaged.planner import layer_parameters as of_layer
from hfpaged.planner import state_parameters as of_state
from hfpaged.planner.config_numbers import number
from hfpaged.planner.model_facts import LayerKV, ModelFacts

# Letters of Nemotron-H's hybrid_override_pattern, and the words of newer configs.
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def blocks(facts: ModelFacts) -> list[str]:
    """Nemotron-H: what each block is, since one is a state, attention, an MLP or experts alone."""
    named = facts.config.get("layers_block_type") or facts.config.get("layer_types")
    pattern = facts.config.get("hybrid_override_pattern", "")
    words = named if isinstance(named, list) else [LETTERS[letter] for letter in pattern if letter in LETTERS]
    return ["linear_attention" if word == "mamba" else str(word) for word in words]


def nemotron_h(facts: ModelFacts, block: str, index: int) -> tuple[int, int, int]:
    """Numbers of weights of one block: those in matrices, in experts, and others."""
    if block == "linear_attention":
        return (of_state.state_layer(facts)[0], 0, of_state.state_layer(facts)[1])
    if block == "moe":
        return of_layer.beside_experts(facts), of_layer.experts(facts), 0
    if block == "mlp":
        return of_layer.dense_mlp(facts, index), 0, 0
    return of_layer.attention(facts, next((each for each in facts.layers if each.kv_heads), LayerKV("full"))), 0, 0


def zamba(facts: ModelFacts) -> tuple[int, int]:
    """Zamba and Zamba2 (arXiv 2405.16712, 2411.15242): a state in each layer, and one or two blocks of attention over
    twice the width that all hybrid layers share, each with a matrix, and in Zamba2 an adapter, of its own. Numbers of
    weights in matrices, and others.
    """
    config, hidden, inner = facts.config, facts.hidden_size, facts.intermediate_size
    kinds = config.get("layers_block_type") or []
    count, hybrid = number(config, "num_hidden_layers"), kinds.count("hybrid")
    wide = number(config, "attention_hidden_size", default=2 * hidden)
    shared = 3 * wide**2 + wide * hidden + 3 * hidden * inner
    own = hidden**2 + number(config, "adapter_rank") * (hidden + 2 * inner)
    matrices, other = of_state.state_layer(facts)
    return count * matrices + number(config, "num_mem_blocks", default=1) * shared + hybrid * own, count * other


def distinct_layers(facts: ModelFacts) -> int:
    """Layers with weights of their own: some families run theirs several times, each time with a cache."""
    config, family = facts.config, of_layer.family_of(facts)
    if family == "hrm_text":  # a slow stack and a fast one
        return 2 * number(config, "num_layers_per_stack")
    if family == "dory":  # attention and MLP count as a layer each
        return number(config, "num_hidden_layers") // 2
    return number(config, "num_hidden_layers") if family == "inkling2_loop_text" else len(facts.layers)


def longcat(facts: ModelFacts, index: int) -> tuple[int, int]:
    """LongCat-Flash (arXiv 2509.01322), whose layer is two of attention and an MLP, with experts beside the first.
    transformers makes up-projections for the experts that compute nothing, too. In matrices, in experts.
    """
    linear = of_layer.attention(facts, facts.layers[index]) + of_layer.dense_mlp(facts, index)
    if index % 2:
        return linear, 0
    one = facts.hidden_size * number(facts.config, *of_layer.EXPERT_INNER)
    experts, idle = of_layer.num_experts(facts.config), number(facts.config, "zero_expert_num")
    return linear + facts.hidden_size * (experts + idle), (3 * experts + 2 * idle) * one
