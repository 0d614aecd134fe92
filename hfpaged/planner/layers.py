"""The layers of a model as a cache sees them, put together from types, heads and states."""

from __future__ import annotations

from hfpaged.errors import InvalidConfigError
from hfpaged.planner import layer_rules as types
from hfpaged.planner.fields import Fields
from hfpaged.planner.head_shapes import head_shape
from hfpaged.planner.layer_types import layer_types
from hfpaged.planner.model_facts import Kind, LayerKV
from hfpaged.planner.state_sizes import state_of
from hfpaged.planner.windows import window_of

_KINDS: dict[str, Kind] = {
    types.FULL: "full", types.INDEXED: "full", types.HYBRID: "full",
    types.SLIDING: "sliding", types.HYBRID_SLIDING: "sliding", "reference_sliding_attention": "dense",
    types.CHUNKED: "chunked", types.LINEAR: "state", types.CONV: "state",
    "moe": "none", "mlp": "none", "minimax_m3_sparse": "dense",
}  # fmt: skip

_POSITIONS = 3 * 8  # Qwen 4 keeps the three rotary positions of each token in its first layer with an indexer


def layers_of(fields: Fields) -> tuple[LayerKV, ...]:
    """What each layer of the decoder keeps. Raises InvalidConfigError for what the config does not tell."""
    kinds = layer_types(fields)
    layers = [_layer(fields, number, kind) for number, kind in enumerate(kinds)]
    borrowed, crossing = _borrowed(fields, len(layers)), _crossing(fields)
    return tuple(
        LayerKV("borrowed", side_dim=layer.side_dim, side_bytes=layer.side_bytes)
        if number in borrowed
        else LayerKV("none")
        if number in crossing
        else layer
        for number, layer in enumerate(layers)
    )


def _borrowed(fields: Fields, count: int) -> set[int]:
    """Layers that read what others store: the last ones (Gemma), or those that a list gives another source for."""
    shared = int(fields.get("num_kv_shared_layers", 0))
    sources = fields.get("kv_source_layers", ())
    return {*range(max(count - shared, 0), count), *(i for i, source in enumerate(sources) if source != i)}


def cross_layers_of(fields: Fields) -> tuple[LayerKV, ...]:
    """Layers that keep what they attend to in an encoder's output: all of an encoder-decoder, some of Mllama."""
    if crossing := _crossing(fields):
        return tuple(_attending(fields, number, types.FULL) for number in crossing)
    if not fields.get("is_encoder_decoder"):
        return ()
    return tuple(_attending(fields, number, types.FULL) for number in range(fields.count("num_hidden_layers")))


def _crossing(fields: Fields) -> list[int]:
    """Layers that attend to pictures alone."""
    default = range(3, 40, 5) if fields.model_type == "mllama_text_model" else ()
    given = fields.get("cross_attention_layers", default)
    return [layer for layer in given if layer < fields.count("num_hidden_layers")]


def _layer(fields: Fields, number: int, layer_type: str) -> LayerKV:
    kind, state = _KINDS.get(layer_type), state_of(fields, number, layer_type)
    if kind is None or state is None:
        raise InvalidConfigError(
            f"model type {fields.model_type!r}: plan does not know what layers of type {layer_type!r} keep of a "
            f"sequence; it knows {', '.join(_KINDS)} of the families of transformers"
        )
    if kind == "none":
        return LayerKV(kind)
    if kind == "state":
        return LayerKV(kind, state_dim=state.numbers, state_bytes=state.fixed_bytes)
    return _attending(fields, number, layer_type)


def _attending(fields: Fields, number: int, layer_type: str) -> LayerKV:
    heads, key_dim, value_dim, latent = head_shape(fields, number, layer_type)
    kind, state = _KINDS[layer_type], state_of(fields, number, layer_type)
    assert state is not None
    side_dim, side_bytes = _indexer(fields, number, layer_type)
    return LayerKV(
        kind if heads else "none", heads, key_dim, value_dim, _window(fields, number, kind, layer_type), latent,
        state.numbers, state.fixed_bytes, side_dim, side_bytes,
    )  # fmt: skip


def _window(fields: Fields, number: int, kind: Kind, layer_type: str) -> int | None:
    own = fields.of_layer(number)
    if kind == "chunked":
        return own.count("attention_chunk_size")
    if kind != "sliding":
        return None
    window = window_of(own)
    if window is None:
        raise InvalidConfigError(
            f"layer {number} of model type {fields.model_type!r} is of type {layer_type!r}, and the config has no "
            f"window for it; plan looked for {', '.join(fields.names('sliding_window'))}"
        )
    return window


def _indexer(fields: Fields, number: int, layer_type: str) -> tuple[int, int]:
    """(numbers, bytes) that an indexer keeps of each token. Layers that share another one's have none."""
    if layer_type not in (types.INDEXED, "minimax_m3_sparse"):
        return 0, 0
    modes = fields.get("indexer_types") or _indexer_modes(fields)
    if modes and number < len(modes) and modes[number] == "shared":
        return 0, 0
    if fields.model_type == "qwen4_exp_text" and fields.get("indexer_head_dim") is None:
        return 0, 0
    dim = fields.count("index_head_dim", fields.get("indexer_head_dim"))
    if fields.model_type == "dots3_note_text":  # normed in float32, and left so
        return 0, 4 * dim
    is_first = number == layer_types(fields).index(layer_type)
    return dim, _POSITIONS if fields.model_type == "qwen4_exp_text" and is_first else 0


def _indexer_modes(fields: Fields) -> list[str]:
    """GLM's rule, and Hunyuan's, for which layers have an indexer of their own."""
    count = fields.count("num_hidden_layers")
    if fields.model_type in ("hy_v4", "hy_v4_vl_text"):
        return ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(count)]
    pattern = fields.get("index_topk_pattern")
    if pattern:
        return [{"F": "full", "S": "shared"}.get(each, each) for each in pattern]
    every, offset = max(fields.get("index_topk_freq", 1), 1), fields.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(count)]
