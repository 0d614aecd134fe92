"""Which layer of a model attends to what: as its config lists it, by a rule of its family, or all alike."""

from __future__ import annotations

from hfpaged.planner.fields import Fields
from hfpaged.planner.layer_rules import ALWAYS, CHUNKED, FULL, IF_ABSENT, OLD_NAMES, SLIDING
from hfpaged.planner.windows import window_of


def layer_types(fields: Fields) -> list[str]:
    """The type of each layer. Raises InvalidConfigError where the config does not tell how many layers there are."""
    given = fields.get("layer_types")
    rule = ALWAYS.get(fields.model_type) or (None if given else IF_ABSENT.get(fields.model_type))
    if rule is not None:
        return rule(fields, 0 if fields.model_type == "nemotron_h" else fields.count("num_hidden_layers"))
    if given:
        return [OLD_NAMES.get(each, each) for each in given]
    return _by_window(fields, fields.count("num_hidden_layers"))


def _by_window(fields: Fields, count: int) -> list[str]:
    """What transformers makes of a config that says no more: all layers slide, are chunked, or neither."""
    if window_of(fields) is not None:
        return [SLIDING] * count
    return [CHUNKED if fields.get("attention_chunk_size") else FULL] * count
