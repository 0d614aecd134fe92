"""The classes of transformers' models: which one belongs to a config, and what it asks of a cache."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from hfpaged.compat import cache_argument

_SCALE = re.compile(r"def \w*attention_scaling\w*\(positions?(_ids)?\b")


def has_blocks_of_images(model: PreTrainedModel) -> bool:
    """Whether its code makes masks in which the tokens of one picture see each other, later ones too."""
    return "block_sequence_ids" in _source_of(type(model))


def scales_by_position(model: PreTrainedModel) -> bool:
    """Whether queries are scaled by where they stand, so that more than distance counts: Llama 4 and Ministral 3, as
    their configs tell, and others (Beam), whose code has a function for it.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "attn_temperature_tuning", None) or rope.get("llama_4_scaling_beta"):
        return True
    classes = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    return any(map(_SCALE.search, map(_source_of, classes)))


def sees_ahead(model: PreTrainedModel) -> bool:
    """Whether it is one of BERT's kind that is no decoder: in them each layer notes what it is."""
    kinds = [kind for module in model.modules() if isinstance(kind := getattr(module, "is_decoder", None), bool)]
    return getattr(model.config, "is_decoder", None) is False and bool(kinds) and not any(kinds)


def _source_of(model_class: type) -> str:
    try:
        return inspect.getsource(sys.modules[model_class.__module__])
    except (OSError, KeyError):
        return ""


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The model that transformers' Auto classes make of this config to generate text; None where they know none."""
    orders: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if getattr(config, "is_encoder_decoder", False):
        orders = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, *orders)
    name = next((names[config.model_type] for names in orders if config.model_type in names), None)
    return None if name is None else getattr(transformers, name, None)


def build(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """A model without trained weights; some classes want a part of the config that names them (text, decoder)."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    wanted = next((part for part in parts if type(part) is model_class.config_class), config)
    return model_class._from_config(wanted)


def makes_dynamic_cache(model_class: type[PreTrainedModel]) -> bool:
    """Whether generate() makes a DynamicCache for it; a few models have caches of classes of their own."""
    return bool(model_class._supports_default_dynamic_cache())


def takes_cache(model_class: type[PreTrainedModel]) -> bool:
    """Whether its forward takes a cache at all."""
    names = inspect.signature(inspect.unwrap(model_class.forward)).parameters
    return cache_argument() in names
