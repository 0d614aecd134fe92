"""What differs between versions of transformers, and what is private in it. The one file that looks at versions."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.generation import utils as generation_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from hfpaged.errors import UnsupportedModelError

ATTENTION_NAME = "hfpaged"
# Functions of transformers that do nothing while a CUDA graph is recorded, and wait for the device else.
LEFT_OUT_OF_GRAPHS = frozenset({"warn_if_padding_and_no_attention_mask"})
WRAP = (
    "an encoder-decoder keeps two caches: pass "
    "EncoderDecoderCache(PagedCache(config=config), DynamicCache(config=config)) "
    "with config = model.config.get_text_config(decoder=True)"
)


@functools.cache
def cache_argument() -> str:
    """What generate() and forward() call the cache: "cache" since 5.20 or so, "past_key_values" before."""
    from transformers.models.llama.modeling_llama import LlamaModel

    names = inspect.signature(inspect.unwrap(LlamaModel.forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def positive_crop_is_length() -> bool:
    """Whether crop(n) with n > 0 keeps n tokens (deprecated, gone in 5.18) or is an error."""
    return Version(transformers.__version__) < Version("5.18")


@functools.cache
def sdpa_knows_softcap() -> bool:
    """Whether transformers' sdpa refuses a soft cap, or (5.17) ignores it in silence."""
    return "softcap" in inspect.getsource(ALL_ATTENTION_FUNCTIONS["sdpa"])


def default_layers(config: PreTrainedConfig) -> list[Any]:
    """The layers of transformers' own cache for this model, in order."""
    layers = list(DynamicCache(config=config).layers)
    return layers + _layers_of_loops(config.get_text_config(decoder=True), layers)


def _layers_of_loops(config: PreTrainedConfig, layers: list[Any]) -> list[Any]:
    """Dory and Inkling 2 Loop run some layers several times, each time with a cache of its own, which they append to
    the list: copies of layers, which cannot be made of ours. They leave a list alone that is long enough.
    """
    if config.model_type == "dory" and config.recurrent_kv_cache_mode == "per_loop":
        start, loops = config.n_input_layers, config.n_recurrent_loops
        return copy.deepcopy(layers[start : start + config.n_recurrent_layers] * (loops - 1))
    if config.model_type == "inkling2_loop_text":
        looped = layers[config.loop_layer_index_start : config.loop_layer_index_end]
        return copy.deepcopy(looped * (config.loop_num_passes - 1))
    return []


# Classes of layers by name: those of 5.17 are fewer. A class that is not here may keep its keys in a way of its own.
_FULL = ("DynamicLayer", "DynamicIndexedLayer", "LinearAttentionAndFullAttentionLayer")
_SLIDING = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


def pageable_window(layer: Any) -> tuple[bool, int | None]:
    """(whether we can page this layer of transformers' cache, its window or None)."""
    if _is_one_of(layer, _FULL):
        return True, None
    if _is_one_of(layer, _SLIDING):
        return True, int(layer.sliding_window)
    return False, None


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers that does the work: `model` itself, or the one that PEFT, torch.compile or a
    data-parallel wrapper has inside. Raises UnsupportedModelError where there is none.
    """
    if isinstance(model, PreTrainedModel):
        return model
    inside = model.modules() if isinstance(model, nn.Module) else ()
    found = next((module for module in inside if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers.PreTrainedModel and holds none, so there is no attention to "
            "page; pass the model on which generate() is called"
        )
    return found


def model_name(model: PreTrainedModel) -> str:
    """What people call it: its name on a hub, the last part of the folder it lies in, or its class."""
    name = str(getattr(model.config, "_name_or_path", "") or "").rstrip("/\\")
    is_path = "\\" in name or name.count("/") > 1 or name.startswith((".", "/", "~"))
    return (re.split(r"[/\\]", name)[-1] if is_path else name) or type(model).__name__


def chunk_size(config: PreTrainedConfig) -> int | None:
    """Of the layers whose queries see their own chunk of the context only; None where there are none."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    return int(text.attention_chunk_size) if "chunked_attention" in kinds else None


def holds_keys(layer: Any) -> bool:
    """Whether a layer of transformers' cache holds keys and values, of whatever kind."""
    return isinstance(layer, CacheLayerMixin)


def _is_one_of(layer: Any, names: tuple[str, ...]) -> bool:
    return any(type(layer) is getattr(cache_utils, name, None) for name in names)


def longest_with_same_positions(config: PreTrainedConfig) -> int | None:
    """The longest prompt whose rotary positions do not depend on its length; None where they never do."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if not any(part.get("rope_type", part.get("type")) in ("dynamic", "longrope") for part in kinds):
        return None
    original = [part.get("original_max_position_embeddings") for part in kinds]
    original += [getattr(text, "original_max_position_embeddings", None), text.max_position_embeddings]
    return int(next(length for length in original if length))


def keeps_state(layer: Any) -> bool:
    """Whether one of transformers' own layers holds anything: those that use the keys of other layers do not."""
    return isinstance(layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin))


@functools.cache
def multimodal_inputs() -> frozenset[str]:
    """Inputs that generate() gives to the first forward of a batch only (a list of names since 5.18 or so)."""
    names = getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ("pixel_values", "input_features"))
    return frozenset((*names, "pixel_values_videos", "image_sizes"))


class PatchedName(str):
    """Our name as a config holds it, with the one that it had before: a copy of a patched config takes it along."""

    origin: str | None = None


def patched_name(origin: str) -> PatchedName:
    name = PatchedName(ATTENTION_NAME)
    name.origin = origin
    return name


def origin_in_name(config: PreTrainedConfig) -> str | None:
    """What a config, or the one that it was copied of, had before it was patched; None where nothing tells."""
    origin: str | None = getattr(config._attn_implementation, "origin", None)
    return origin


def attention_of(config: PreTrainedConfig) -> str:
    return str(config._attn_implementation)


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs in which the models inside `model` look up their attention, each once; but for those whose
    attention does not go through transformers' registry: its own code must stay.
    """
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    fixed = {id(m.config) for m in parts if not m._can_set_attn_implementation()}
    return list({id(m.config): m.config for m in parts if id(m.config) not in fixed}.values())


def set_attention(config: PreTrainedConfig, name: str) -> None:
    """Switch one config, not its sub-configs. The public setter recurses, and cannot restore mixed settings."""
    config._attn_implementation_internal = name


def register_attention(function: Callable[..., Any], mask_function: Callable[..., Any]) -> None:
    """Make our attention known by name. Both parts: without its mask function padding is lost in silence."""
    AttentionInterface.register(ATTENTION_NAME, function)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_function)


def own_mask_function(name: str) -> Callable[..., Any] | None:
    """transformers' mask function for an attention implementation, None where it has none."""
    function: Callable[..., Any] | None = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    return function


def own_attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """transformers' attention function of that name; the eager one is in the model's own file."""
    if name != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward


def collects_attentions() -> bool:
    """Whether the forward under way wants attention weights. Hooks on the layers collect them; some models tell
    only those, not the attention function.
    """
    collected = output_capturing._active_collector.get()
    return collected is not None and any(key.endswith("attentions") for key in collected)
