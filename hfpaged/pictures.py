"""Prompts with pictures, sound or films: known prefixes hold them already, so the rest is computed without them.

transformers itself leaves these inputs out of every forward but the first, whose tokens have places for them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from hfpaged import compat
from hfpaged.content import Content

_PLACE = re.compile(r"(image|video|audio)_token_(id|index)")
# Where and how large they are; harmless without them.
_ABOUT = re.compile(r"(image|video|audio)_|second_per_grid")


def input_names(content: Content) -> list[str]:
    """Inputs that belong to no single position, by name."""
    return [key.kind.removeprefix("input:") for key in content.keys if key.kind.startswith("input:")]


def can_be_known(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """Whether all these inputs are pictures and the like that stand in places among the tokens, and nowhere else."""
    fitting = all(name in compat.multimodal_inputs() or _ABOUT.match(name) for name in names)
    return fitting and bool(_places(model)) and not any("cross_attention" in name for name in _config_names(model))


def are_all_before(model: PreTrainedModel, rows: Iterable[tuple[array[int], int]], width: int) -> bool:
    """Whether each row of (items, tokens that are known) has all its places in what is known; one place at least."""
    places = _places(model)
    parts = [(items[: known * width : width], items[known * width :: width]) for items, known in rows]
    return any(places & set(known) for known, _ in parts) and not any(places & set(rest) for _, rest in parts)


def without(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a forward behind all pictures."""
    return {name: given for name, given in inputs.items() if name not in compat.multimodal_inputs()}


def _places(model: PreTrainedModel) -> set[int]:
    """Token ids that stand for a part of a picture."""
    config = model.config.to_dict()
    return {number for name, number in config.items() if _PLACE.fullmatch(name) and isinstance(number, int)}


def _config_names(model: PreTrainedModel) -> set[str]:
    config = model.config
    return set(config.to_dict()) | set(config.get_text_config(decoder=True).to_dict())
