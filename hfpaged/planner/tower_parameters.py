"""The weights of towers for pictures and sound, which stand beside the part that generates: roughly, as their shapes
differ more than what their configs say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hfpaged.planner.config_numbers import Config, number
from hfpaged.planner.families import PARTS
from hfpaged.planner.model_facts import ModelFacts

LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers", "layers", "n_layers")
HIDDEN = ("hidden_size", "embed_dim", "d_model", "width")
INNER = ("intermediate_size", "encoder_ffn_dim", "ffn_dim", "mlp_dim")
GATED = ("silu", "swiglu", "gelu_pytorch_tanh_glu")


def towers(facts: ModelFacts) -> int:
    """Weights of all towers, and of one matrix each that leads into the part that generates."""
    return sum(_tower(config, facts.hidden_size) for config in _parts(facts.whole))


def _parts(whole: Config) -> Iterator[Config]:
    """The configs within `whole` that are no part of the one that generates."""
    generating = next((name for name in PARTS if isinstance(whole.get(name), Mapping)), None)
    for name, value in whole.items():
        if not isinstance(value, Mapping):
            continue
        if name != generating and number(value, *HIDDEN) and number(value, *LAYERS):
            yield value
        else:
            yield from _parts(value)


def _tower(config: Config, into: int) -> int:
    hidden = number(config, *HIDDEN)
    inner = number(config, *INNER) or int(hidden * _ratio(config))
    matrices = 3 if str(config.get("hidden_act", "")) in GATED else 2
    patches = number(config, "num_channels", "in_channels", default=3) * number(config, "patch_size") ** 2
    merged = hidden * max(number(config, "spatial_merge_size"), 1) ** 2
    layer = 4 * hidden**2 + matrices * hidden * inner
    return number(config, *LAYERS) * layer + hidden * patches + merged * into


def _ratio(config: Mapping[str, Any]) -> float:
    value = config.get("mlp_ratio")
    return float(value) if isinstance(value, (int, float)) else 4.0
