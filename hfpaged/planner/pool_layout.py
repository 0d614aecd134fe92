"""From what is known of a model's layers to the bytes of a pool's blocks, and to those of a dense cache."""

from __future__ import annotations

from hfpaged.config import DEFAULT_BLOCK_SIZE, check_block_size, check_count
from hfpaged.errors import InvalidConfigError
from hfpaged.layer_groups import LayerGroup, group_layers
from hfpaged.planner.kv_formats import check_dims, dtype_bytes, plan_format
from hfpaged.planner.layout import PoolLayout
from hfpaged.planner.model_facts import LayerKV, ModelFacts
from hfpaged.planner.tp_plan import check_tp, splits_heads
from hfpaged.stream_rule import DEFAULT_SINKS, chunk_size, stream_rules

_PAGED = ("full", "sliding", "chunked")


def layout_of(
    facts: ModelFacts, kv_format: str = "auto", block_size: int = DEFAULT_BLOCK_SIZE, tp: int = 1,
    window: int | None = None, dtype: str | None = None,
) -> PoolLayout:  # fmt: skip
    """The pool that hfpaged would make, on one of `tp` ranks. `window`: as in `PagedCache(model, window=)`, with its
    sinks and the piece of a prompt that is under way; `dtype`: what the model computes in, where that is not the one
    of its config.

    Raises InvalidConfigError for formats, dtypes and sizes that cannot work, and windows for models without any.
    """
    check_block_size(block_size)
    check_tp(facts, tp)
    fmt, computed = plan_format(kv_format), dtype or facts.dtype
    groups = _groups(facts)
    ranks = tp if splits_heads(facts, tp) else 1  # that have heads of their own
    stores = {
        (place, _shape(facts.layers[layer], ranks)) for group in groups for place, layer in enumerate(group.layers)
    }
    shapes = [shape for _, shape in stores]
    for _, key_dim, value_dim in shapes:
        check_dims(fmt, key_dim, value_dim)
    return PoolLayout(
        fmt.name, block_size,
        _windows(facts, groups, window, block_size),
        sum(fmt.block_bytes(*shape, block_size, computed) for shape in shapes),
        _state_bytes(facts, computed),
        len(groups) * sum(fmt.residual_bytes(*shape, block_size, computed) for shape in shapes),
        _token_bytes(facts, tp, computed),
    )  # fmt: skip


def dense_bytes(facts: ModelFacts, tokens: int, tp: int = 1, dtype: str | None = None) -> int:
    """Bytes of one sequence in transformers' DynamicCache: keys and values of `tokens` tokens in each layer, of the
    last `window` - 1 in layers with a window, and the states.
    """
    check_tp(facts, tp)
    computed = dtype or facts.dtype
    ranks = tp if splits_heads(facts, tp) else 1
    numbers = sum(_row(layer, ranks) * _kept(layer, tokens) for layer in facts.layers if layer.kind in _PAGED)
    states = _state_bytes(facts, computed) + _token_bytes(facts, tp, computed) * tokens
    return numbers * dtype_bytes(computed) + states


def cross_bytes(facts: ModelFacts, encoder_tokens: int, tp: int = 1, dtype: str | None = None) -> int:
    """Bytes of the keys and values of `encoder_tokens` tokens that one sequence's cross-attention reads; 0 for a model
    without any. hfpaged leaves them to transformers' own cache.
    """
    check_tp(facts, tp)
    ranks = tp if splits_heads(facts, tp) else 1
    numbers = sum(_row(layer, ranks) for layer in facts.cross_layers)
    return numbers * encoder_tokens * dtype_bytes(dtype or facts.dtype)


def _groups(facts: ModelFacts) -> tuple[LayerGroup, ...]:
    return group_layers({number: layer.window for number, layer in enumerate(facts.layers) if layer.kind in _PAGED})


def _shape(layer: LayerKV, ranks: int) -> tuple[int, int, int]:
    """On each of `ranks` that have heads of their own; a latent is whole on all of them."""
    return layer.kv_heads if layer.latent_dim else layer.kv_heads // ranks, layer.key_dim, layer.value_dim


def _row(layer: LayerKV, ranks: int) -> int:
    """Numbers of one token."""
    heads, key_dim, value_dim = _shape(layer, ranks)
    return heads * (key_dim + value_dim)


def _state_bytes(facts: ModelFacts, computed: str) -> int:
    """Of each sequence. No plan splits what keeps a state: `linear_attn` gathers its outputs on each rank."""
    size = dtype_bytes(computed)
    return sum(layer.state_dim * size + layer.state_bytes for layer in facts.layers)


def _token_bytes(facts: ModelFacts, tp: int, computed: str) -> int:
    """Of each token outside of blocks. The keys of an indexer are those of one head: every rank has them all."""
    ranks = tp if splits_heads(facts, tp) else 1
    dense = sum(_row(layer, ranks) for layer in facts.layers if layer.kind == "dense")
    side = sum(layer.side_dim for layer in facts.layers)
    return (dense + side) * dtype_bytes(computed) + sum(layer.side_bytes for layer in facts.layers)


def _kept(layer: LayerKV, tokens: int) -> int:
    return tokens if layer.window is None else min(tokens, layer.window - 1)


def why_no_window(facts: ModelFacts) -> str | None:
    """Why `PagedCache(model, window=)` refuses such a model, as far as its config tells; None where it does not."""
    if any(layer.state_dim or layer.state_bytes or layer.side_dim or layer.side_bytes for layer in facts.layers):
        return "some of its layers keep a state of their own, in which all that is forgotten would live on"
    if any(layer.kind == "chunked" for layer in facts.layers):
        return "its layers attend in chunks, which are counted from the first position"
    if any(layer.latent_dim for layer in facts.layers):
        return "its attention has code of its own, which needs a dense view of all positions"
    ropes = facts.config.get("rope_parameters") or facts.config.get("rope_scaling") or {}
    kinds = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    if any(rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope") for rope in kinds):
        return "its rotary positions change with the length of the text, and with them all keys that are stored"
    return None


def _windows(
    facts: ModelFacts, groups: tuple[LayerGroup, ...], window: int | None, block_size: int
) -> tuple[int | None, ...]:
    """Of each group, in tokens that lie in blocks."""
    own = tuple(group.window for group in groups)
    if window is None:
        return own
    check_count("window", window, 1)
    if why := why_no_window(facts):
        raise InvalidConfigError(f"{facts.name} cannot stream with window={window}: {why}; leave it out")
    rules = stream_rules(groups, window, DEFAULT_SINKS, block_size)
    if rules is None:
        return own
    held = window + chunk_size(window, block_size)
    return tuple(rule.kept * block_size + held if rule else each for rule, each in zip(rules, own, strict=True))
