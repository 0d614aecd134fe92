"""What one step takes for a while beside weights and pool: an estimate, as a plan has no model to try.

T tokens (the token budget) of b bytes a number, hidden size H, heads of dimension d, inner size I of the MLP. A layer's
tensors are freed before the next one's are made, so the largest moment of one layer counts. Four tensors of T x H live
in each of them: the embeddings, the layer's input, the residual and its norm.

    norm        T x H x (4b + 8)                       and two copies in float32
    attention   T x b x (4H + 2q + 2k + v + o)         queries and keys before and after their rotation
    MLP         T x b x (4H + 3I)                      gate, up and their product; 2I without a gate, 5I where GELU is
                                                       written out in single operations (gelu_new)
    experts     T x b x (5H + chosen x (2H + 3I))      the same for each expert that a token takes
    logits      rows x vocabulary x (b + 8)            as the model gives them, in float32, and as probabilities

with q = heads x d, k and v = KV heads x d, o = heads x d of values.
"""

from __future__ import annotations

from hfpaged.planner.config_numbers import number
from hfpaged.planner.layer_parameters import EXPERT_INNER, family_of, matrices, num_experts
from hfpaged.planner.model_facts import LayerKV, ModelFacts
from hfpaged.planner.tp_plan import split_kinds, splits_heads
from hfpaged.planner.weight_precision import float_bits

MAX_NUM_SEQS = 128  # rows whose next token is chosen in one step, where nothing is said: as the batcher's default
WRITTEN_OUT = ("gelu_new", "gelu_fast", "gelu_python")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def activation_bytes(
    facts: ModelFacts, tokens: int, dtype: str | None = None, rows: int = MAX_NUM_SEQS, tp: int = 1
) -> int:
    """Bytes of one rank's largest moment in a step of `tokens`, of which `rows` get a next token.

    Of five small models (Llama with and without few KV heads, GPT-2, Gemma 2, Mixtral; 512 tokens, float32) it was 0.94
    to 1.09 of what torch had allocated at the largest moment, and 0.5 to 1.2 of what a batcher that sizes its pool on a
    CPU finds, whose measure is the growth of the process, code and allocator included.
    """
    size = float_bits(dtype or facts.dtype) // 8
    moments = [_norm(facts, size), _mlp(facts, size, tp)]
    moments += [_attention(facts, layer, size, tp) for layer in set(facts.layers)]
    return max(tokens * max(moments), min(rows, tokens) * facts.vocab_size * (size + 8))


def _norm(facts: ModelFacts, size: int) -> int:
    return facts.hidden_size * (4 * size + 8)


def _attention(facts: ModelFacts, layer: LayerKV, size: int, tp: int) -> int:
    """Bytes of one token, of whole heads where a rank has none of its own."""
    ranks = tp if splits_heads(facts, tp) else 1
    heads, kv_heads = facts.attention_heads // ranks, layer.kv_heads // ranks
    turned = 2 * (heads + kv_heads) * layer.key_dim
    return size * (4 * facts.hidden_size + turned + (heads + kv_heads) * layer.value_dim)


def _mlp(facts: ModelFacts, size: int, tp: int) -> int:
    """Bytes of one token, in a layer of experts where there are some."""
    config, hidden, copies = facts.config, facts.hidden_size, _copies(facts)
    inner = facts.intermediate_size or 4 * hidden
    kind = "mlp" if num_experts(config) < 2 else "experts"
    tp = tp if tp > 1 and kind in split_kinds(facts, tp) else 1
    if num_experts(config) < 2:
        return size * (4 * hidden + copies * -(-inner // tp))
    of_expert = -(-number(config, *EXPERT_INNER, default=inner) // tp)
    return size * (5 * hidden + number(config, *CHOSEN, default=2) * (2 * hidden + copies * of_expert))


def _copies(facts: ModelFacts) -> int:
    """Tensors as wide as the MLP's inside that live at once."""
    written_out = any(facts.config.get(name) in WRITTEN_OUT for name in ("activation_function", "hidden_act"))
    return 5 if written_out else matrices(facts.config, family_of(facts))
