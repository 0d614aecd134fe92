"""Which layer attends to what in families whose configs do not list it, or not all of it: a rule for each, in
transformers' words for types of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.fields import Fields
from hfpaged.planner.windows import window_of

FULL, SLIDING, CHUNKED, INDEXED = "full_attention", "sliding_attention", "chunked_attention", "indexed_attention"
LINEAR, CONV, HYBRID, HYBRID_SLIDING = "linear_attention", "conv", "hybrid", "hybrid_sliding"
Rule = Callable[[Fields, int], list[str]]

# Names that older config.json files use.
OLD_NAMES = {
    "mamba": LINEAR, "recurrent": LINEAR, "attention": FULL, "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}  # fmt: skip


def _every(period: int, special: str = FULL, usual: str = SLIDING, name: str = "", at: int = -1) -> Rule:
    """A `special` layer in each `period` (which the field `name` may say otherwise), the last one of it by default."""

    def rule(fields: Fields, count: int) -> list[str]:
        every = int(fields.get(name, period)) if name else period
        return [special if every == 0 or i % every == at % every else usual for i in range(count)]

    return rule


def _all(kind: str) -> Rule:
    return lambda fields, count: [kind] * count


def _listed(name: str, listed: str, others: str) -> Rule:
    """The layers whose numbers the field `name` lists, or all where it lists none."""

    def rule(fields: Fields, count: int) -> list[str]:
        places = fields.get(name)
        return [listed if places is None or i in places else others for i in range(count)]

    return rule


def _from_layer(fields: Fields, count: int) -> list[str]:
    """Qwen's windows: from layer `max_window_layers` on."""
    window, first = window_of(fields), fields.get("max_window_layers", 0)
    return [SLIDING if window is not None and i >= first else FULL for i in range(count)]


def _qwen2_moe(fields: Fields, count: int) -> list[str]:
    slides, first = bool(fields.get("use_sliding_window")), fields.get("max_window_layers", 0)
    return [SLIDING if slides and i % 2 == 0 and i < first else FULL for i in range(count)]


def _llama4(fields: Fields, count: int) -> list[str]:
    every = fields.get("no_rope_layer_interval", 4)
    rotary = fields.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    has_chunks = fields.get("attention_chunk_size") is not None
    return [CHUNKED if each and has_chunks else FULL for each in rotary]


def _smollm3(fields: Fields, count: int) -> list[str]:
    every = fields.get("no_rope_layer_interval", 4)
    rotary = fields.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    slides = bool(fields.get("use_sliding_window")) and window_of(fields) is not None
    return [SLIDING if slides and not each else FULL for each in rotary]


def _muse(fields: Fields, count: int) -> list[str]:
    return [FULL if (count - 1 - i) % 4 == 0 else SLIDING for i in range(count)]


def _inkling(fields: Fields, count: int) -> list[str]:
    local = fields.get("local_layer_ids")
    slides = [(i + 1) % 6 != 0 if local is None else i in local for i in range(count)]
    return [HYBRID_SLIDING if each else HYBRID for each in slides]


def _exaone4(fields: Fields, count: int) -> list[str]:
    pattern: Any = fields.get("sliding_window_pattern", 4)
    if window_of(fields) is None:
        return [FULL] * count
    if isinstance(pattern, str):  # "LLLG": local three times, then global
        return [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
    return _every(int(pattern))(fields, count)


def _cohere2_moe(fields: Fields, count: int) -> list[str]:
    """The dense layers at the beginning have a pattern of their own."""
    first = int(fields.get("first_k_dense_replace", 0))
    before = _every(1, name="prefix_dense_sliding_window_pattern")(fields, first)
    return before + _every(4, name="sliding_window_pattern")(fields, count - first)


def _jamba(fields: Fields, count: int) -> list[str]:
    return _every(fields.get("attn_layer_period", 8), FULL, LINEAR, at=fields.get("attn_layer_offset", 4))(
        fields, count
    )


def _zamba(fields: Fields, count: int) -> list[str]:
    period, offset = fields.get("attn_layer_period", 6), fields.get("attn_layer_offset", 4)
    return [LINEAR, LINEAR, HYBRID, *_every(period, HYBRID, LINEAR, at=offset)(fields, count - 3)]


def _zamba2(fields: Fields, count: int) -> list[str]:
    """The 54 layers of the released models."""
    linear, hybrid = [LINEAR], [HYBRID]
    return linear + (5 * linear + hybrid) * 7 + 4 * linear + hybrid + 3 * linear + hybrid + 2 * linear


def _nemotron_h(fields: Fields, count: int) -> list[str]:
    """A letter for each layer. The number of layers is not taken from elsewhere."""
    letters = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
    pattern = fields.values.get("hybrid_override_pattern")
    if not pattern:
        return [LINEAR, "moe", FULL, "mlp"]
    if unknown := sorted(set(pattern) - set(letters)):
        raise InvalidConfigError(
            f"hybrid_override_pattern={pattern!r} has the letters {unknown}; known ones are {', '.join(letters)}"
        )
    return [letters[letter] for letter in pattern]


def _kimi(fields: Fields, count: int) -> list[str]:
    own = fields.get("linear_attn_config") or {}
    if "full_attn_layers" in own:  # numbers from 1 on
        return [FULL if i + 1 in own["full_attn_layers"] else LINEAR for i in range(count)]
    return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]


def _minimax_m3(fields: Fields, count: int) -> list[str]:
    sparse = (fields.get("sparse_attention_config") or {}).get("sparse_attention_freq") or [0] * count
    return ["minimax_m3_sparse" if each else FULL for each in sparse]


def _recurrent_gemma(fields: Fields, count: int) -> list[str]:
    blocks = fields.get("block_types") or ["recurrent", "recurrent", "attention"]
    return [LINEAR if blocks[i % len(blocks)] == "recurrent" else SLIDING for i in range(count)]


def _dots3(fields: Fields, count: int) -> list[str]:
    """Released configs call the layers with an indexer full attention, and say `use_dsa`."""
    default = None if "per_layer_config" in fields.values else True
    has_indexer = fields.get("use_dsa", default)
    slides = fields.get("use_sliding_window", True)
    types = fields.get("layer_types") or [
        (FULL if has_indexer is False else INDEXED) if not slides or i < 2 or i % 4 == 1 else SLIDING
        for i in range(count)
    ]
    types = [OLD_NAMES.get(each, each) for each in types]
    if has_indexer is None:
        return types
    old, new = (FULL, INDEXED) if has_indexer else (INDEXED, FULL)
    return [new if each == old else each for each in types]


def _dory(fields: Fields, count: int) -> list[str]:
    """Released configs list attention and what follows it as two layers. Some layers run several times."""
    given, scale = fields.get("layer_types"), 1
    if given and "mlp" in given:
        given, scale = given[::2], 2
    types = given or _every(4)(fields, count)
    loops = int(fields.get("n_recurrent_loops", 1)) - 1
    if fields.get("recurrent_kv_cache_mode") != "per_loop" or loops < 1:
        return list(types)
    first, last = (fields.get(name, 0) // scale for name in ("n_input_layers", "n_output_layers"))
    looped = fields.get("n_recurrent_layers")
    number = len(types) - first - last if looped is None else looped // scale
    return [*types, *(list(types[first : first + number]) * loops)]


def _inkling2_loop(fields: Fields, count: int) -> list[str]:
    """The layers in the middle run several times, each time with a cache of their own behind the others."""
    types = fields.get("layer_types") or _every(6, HYBRID, HYBRID_SLIDING)(fields, count)
    own = fields.get("loop_config") or {}
    first = own.get("core_start", fields.get("loop_layer_index_start", 6))
    last = own.get("core_end", fields.get("loop_layer_index_end", 18))
    return [*types, *(types[first:last] * (own.get("num_passes", fields.get("loop_num_passes", 3)) - 1))]


def _qwen4(fields: Fields, count: int) -> list[str]:
    types = fields.get("layer_types") or _every(4, INDEXED, LINEAR, "full_attention_interval")(fields, count)
    return [INDEXED if each in (FULL, "qwen_sparse_attention") else OLD_NAMES.get(each, each) for each in types]


def _gemma4(fields: Fields, count: int) -> list[str]:
    types = fields.get("layer_types") or _every(6)(fields, count)
    return [*types[:-1], FULL]


def _hrm(fields: Fields, count: int) -> list[str]:
    """A stack runs `L_cycles` times with a cache of its own, and another one once, `H_cycles` times in all."""
    if fields.get("num_layers_per_stack") is None:
        count *= fields.count("H_cycles") * (fields.count("L_cycles") + 1)
    return [FULL] * count


_GEMMA3 = _every(6, name="sliding_window_pattern")
# Rules that say more than a list of types in the config does.
ALWAYS: dict[str, Rule] = {
    "bamba": lambda fields, count: [
        FULL if i in (fields.get("attn_layer_indices") or ()) else LINEAR for i in range(count)
    ],
    "dory": _dory, "dots3_note_text": _dots3, "falcon_h1": _all(HYBRID), "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4, "diffusion_gemma_text": _gemma4, "hrm_text": _hrm,
    "inkling2_loop_text": _inkling2_loop, "jamba": _jamba,
    "longcat_flash": lambda _, count: [FULL] * 2 * count, "qwen4_exp_text": _qwen4, "recurrent_gemma": _recurrent_gemma,
}  # fmt: skip
IF_ABSENT: dict[str, Rule] = {
    "afmoe": _every(4, name="global_attn_every_n_layers"),
    "axk2": _all(INDEXED), "deepseek_v32": _all(INDEXED), "glm_moe_dsa": _all(INDEXED), "hy_v4": _all(INDEXED),
    "hy_v4_vl_text": _all(INDEXED), "mistral_large4_text": _all(INDEXED),
    "bailing_hybrid": _every(4, FULL, LINEAR, "layer_group_size"),
    "beam": lambda fields, count: [*_every(6)(fields, count)[:-1], FULL],
    "cohere2": _every(4, name="sliding_window_pattern"), "cohere2_moe": _cohere2_moe,
    "cohere_compass_text": _all(FULL), "laguna": _all(FULL), "mellum": _all(FULL),
    "cwm": _every(4, at=0), "granite_swa": _every(4, at=0), "granitemoe_swa": _every(4, at=0),
    "dots1": _from_layer, "qwen2": _from_layer, "qwen3": _from_layer, "qwen2_moe": _qwen2_moe,
    "exaone4": _exaone4, "exaone_moe": _exaone4,
    "flint": lambda _, count: [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)],
    "gemma2": _every(2), "vaultgemma": _every(2), "gpt_oss": _every(2), "t5_gemma_module": _every(2),
    "gemma3_text": _GEMMA3, "t5gemma2_text": _GEMMA3, "t5gemma2_decoder": _GEMMA3, "gemma3n_text": _every(5),
    "kolibri1": _every(5),
    "glm5_next_text": _every(4, INDEXED, LINEAR), "granitemoehybrid": _all(LINEAR),
    "inkling_text": _inkling,
    "inkling2_text": _every(6, HYBRID, HYBRID_SLIDING),
    "kimi_linear": _kimi,
    "lara_mini": lambda _, count: [[LINEAR, SLIDING, LINEAR, FULL, SLIDING][i % 5] for i in range(count)],
    "lfm2": _listed("full_attn_idxs", FULL, CONV), "lfm2_moe": _listed("full_attn_idxs", FULL, CONV),
    "lfm3": lambda _, count: [
        FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(count)
    ],
    "llama4_text": _llama4,
    "mimo_v2_flash": lambda _, count: [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)],
    "minimax_m3_vl_text": _minimax_m3, "muse_glimmer_text": _muse, "muse_spark_text": _muse,
    "modernbert-decoder": _every(3, name="global_attn_every_n_layers", at=0),
    "nemotron_h": _nemotron_h,
    "olmo3": _every(4), "olmo_hybrid": _every(4, FULL, LINEAR),
    "qwen3_next": _every(4, FULL, LINEAR, "full_attention_interval"),
    "qwen3_5_text": _every(4, FULL, LINEAR, "full_attention_interval"),
    "qwen3_5_moe_text": _every(4, FULL, LINEAR, "full_attention_interval"),
    "smollm3": _smollm3, "zamba": _zamba, "zamba2": _zamba2, "zaya": _all(HYBRID),
}  # fmt: skip
