"""What of a model's weights lies on one of several ranks: the largest part, where sizes do not divide."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from hfpaged.planner import layer_parameters as of_layer
from hfpaged.planner import tower_parameters
from hfpaged.planner.config_numbers import flag, number
from hfpaged.planner.model_facts import ModelFacts
from hfpaged.planner.parameter_families import TIED
from hfpaged.planner.parameters import Parameters
from hfpaged.planner.tp_plan import is_embedding, split_kinds, split_names

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Shards:
    """By the names that tensors have in files."""

    def __init__(self, facts: ModelFacts, names: frozenset[str], tp: int) -> None:
        self._tp = tp
        self._styles = {} if tp == 1 else split_names(facts, tp)
        # A head that is tied to the embedding is no tensor of its own, and both are split as the head is.
        self._is_tied = not any("lm_head" in name or "embed_out" in name for name in names)

    def numel(self, name: str, shape: tuple[int, ...]) -> int:
        """Numbers of this tensor on one rank."""
        module, _, part = _NUMBER.sub("*", name).rpartition(".")
        style = self._style(module, f"{module}.{part}")
        whole = math.prod(shape)
        if style is None or (part == "bias" and "rowwise" in style):
            return whole
        if shape and ("colwise" in style or "embedding" in style) and len(shape) < 3:
            return -(-shape[0] // self._tp) * (whole // max(shape[0], 1))
        return -(-whole // self._tp)

    def _style(self, module: str, full: str) -> str | None:
        if self._is_tied and is_embedding(module) and "lm_head" in self._styles:
            return self._styles["lm_head"]
        for name, style in self._styles.items():
            if any(given == name or given.endswith(f".{name}") for given in (module, full)):
                return style
            experts, found, _ = name.rpartition("experts.")
            if found and f"{experts}{found}*." in f"{module}.":  # files have each of them, a model has them in one
                return style
        return None


def on_one_rank(facts: ModelFacts, parameters: Parameters, tp: int) -> Parameters:
    """Counted weights. Norms, biases and towers for pictures are whole on each."""
    splits = set() if tp == 1 else split_kinds(facts, tp)
    tied = flag(facts.config, "tie_word_embeddings", default=of_layer.family_of(facts) in TIED)
    if tied and "head" in splits:
        splits.add("embedding")
    attention = min(sum(_attention(facts, index) for index in range(len(facts.layers))), parameters.linear)
    whole = min(_kept_whole(facts) + tower_parameters.towers(facts), parameters.linear)

    def part(kind: str, numbers: int) -> int:
        return -(-numbers // tp) if kind in splits else numbers

    split_attention = max(0, attention - _kept_whole(facts))
    rest = max(0, parameters.linear - whole - split_attention)
    return replace(
        parameters,
        embedding=part("embedding", parameters.embedding),
        head=part("head", parameters.head),
        linear=whole + part("attention", split_attention) + part("mlp", rest),
        experts=part("experts", parameters.experts),
    )


def _attention(facts: ModelFacts, index: int) -> int:
    layer = facts.layers[index]
    return 0 if layer.kind == "state" else of_layer.attention(facts, layer)


def _kept_whole(facts: ModelFacts) -> int:
    """Of multi-head latent attention: what leads down into the latents, and is not split by heads."""
    config, hidden = facts.config, facts.hidden_size
    rank = number(config, "kv_lora_rank")
    if not rank:
        return 0
    return len(facts.layers) * hidden * (rank + number(config, "qk_rope_head_dim") + number(config, "q_lora_rank"))
