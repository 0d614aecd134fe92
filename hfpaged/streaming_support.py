"""Which models a streaming cache is right for."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hfpaged import compat
from hfpaged.attention_code import writers
from hfpaged.config import check_count
from hfpaged.errors import InvalidConfigError, UnsupportedModelError
from hfpaged.layer_groups import LayerGroup
from hfpaged.model_classes import scales_by_position
from hfpaged.sinks import takes_positions
from hfpaged.stream_rule import DEFAULT_SINKS, stream_rules
from hfpaged.streaming import Streaming


def make_streaming(
    model: nn.Module | None, groups: tuple[LayerGroup, ...], has_state: bool, block_size: int,
    window: int | None, sinks: int | None,
) -> Streaming | None:  # fmt: skip
    """What `PagedCache(model, window=, sinks=)` asks for; None where no layer would forget anything by it.
    `has_state`: whether layers hold more than keys and values.

    Raises InvalidConfigError, UnsupportedModelError.
    """
    if window is None:
        if sinks is not None:
            raise InvalidConfigError(f"sinks={sinks} without window=: say how many of the last tokens to keep as well")
        return None
    check_count("window", window, 1)
    sinks = DEFAULT_SINKS if sinks is None else check_count("sinks", sinks, 0)
    if model is None:
        raise InvalidConfigError(
            f"window={window} needs the model, whose forwards tell when to forget; write PagedCache(model, "
            f"window={window})"
        )
    rules = stream_rules(groups, window, sinks, block_size)
    why = _why_not(compat.transformers_model(model), has_state, sinks) if rules else None
    if why is not None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot stream with window={window}, sinks={sinks}: {why}")
    return Streaming(rules, block_size) if rules else None


def _why_not(model: PreTrainedModel, has_state: bool, sinks: int) -> str | None:
    if has_state:
        return "some of its layers keep a state of their own, in which all that is forgotten would live on"
    if not all(code.is_switchable and code.hands_over and code.keeps_mask for _, code in writers(model)):
        return "its attention has code of its own, which needs a dense view of all positions"
    if compat.chunk_size(model.config) is not None:
        return "its layers attend in chunks, which are counted from the first position"
    if compat.longest_with_same_positions(model.config) is not None:
        return "its rotary positions change with the length of the text, and with them all keys that are stored"
    if sinks and scales_by_position(model):
        return "its queries are scaled by their position, which is that in the whole text; use sinks=0"
    if sinks and not (takes_positions(model) and _is_rotary(model)):
        return "sinks move along with the window, which needs rotary positions; use sinks=0"
    return None


def _is_rotary(model: Any) -> bool:
    """Whether some part of the model makes rotary positions, as those of transformers are called."""
    return any("Rotary" in type(module).__name__ for module in model.modules())
