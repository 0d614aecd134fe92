"""What a PagedCache does for a model, told from the config and the code of the model, without weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfpaged import compat, model_classes
from hfpaged.attention_code import AttentionCode, switchable_configs, writers
from hfpaged.errors import InvalidConfigError
from hfpaged.pageable import cross_attention_layers, why_refused

FAST, CORRECT, REFUSED, NO_CACHE = "fast", "correct", "refused", "no cache"
_KINDS = {
    "DynamicLayer": "full attention",
    "DynamicSlidingWindowLayer": "sliding window of {window}",
    "DynamicIndexedLayer": "sparse attention with an indexer",
    "LinearAttentionAndFullAttentionLayer": "full attention beside a state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding window of {window} beside a state",
    "LinearAttentionLayer": "linear attention, convolution or state space (not paged)",
    "DummyLayer": "no keys of their own",
}


_NOTHING = "none is needed: model.generate(**inputs, past_key_values=PagedCache(model))"
_WRAP = f"hfpaged.patch(model) for the kernels; {compat.WRAP}"


@dataclass(frozen=True)
class Verdict:
    """`outcome`: "fast" (our kernels read the blocks), "correct" (some layers get dense views, the tokens are the
    same), "refused" (a named error) or "no cache" (there are no keys and values to page).
    """

    outcome: str
    model_class: str
    reasons: tuple[str, ...]
    layers: dict[str, int]  # how many of each kind
    attention: str
    remedy: str
    notes: tuple[str, ...] = ()  # what holds beside the verdict, for some inputs

    @property
    def works(self) -> bool:
        return self.outcome in (FAST, CORRECT)


def examine(config: PreTrainedConfig) -> Verdict:
    """The verdict on the model that AutoModelForCausalLM and its like make of `config`.

    Raises InvalidConfigError for a config of which transformers makes no model that generates.
    """
    refusal = why_refused(config)
    model_class = model_classes.model_class_of(config)
    if refusal is not None:
        name = "?" if model_class is None else model_class.__name__
        outcome = REFUSED if refusal.has_kv_cache else NO_CACHE
        layers = _count_layers(config) if refusal.for_its_layers else {}
        return Verdict(outcome, name, (refusal.reason,), layers, "", "leave the cache to generate()")
    if model_class is None:
        raise InvalidConfigError(f"transformers knows no model that generates text for {type(config).__name__}")
    return judge(_on_meta(config, model_class))


def judge(model: PreTrainedModel) -> Verdict:
    """The verdict on a model, on whatever device it is. Its cache is taken not to be refused."""
    reasons = (*_reasons(_codes_of_paged_layers(model)), *_reasons_of_layers(model.config))
    wraps = bool(getattr(model.config, "is_encoder_decoder", False))
    return Verdict(
        CORRECT if reasons else FAST,
        type(model).__name__,
        reasons,
        _count_layers(model.config),
        "switched to the paged kernels by hfpaged.patch(model)" if switchable_configs(model) else "keeps its own code",
        _WRAP if wraps else _NOTHING,
        _notes(model),
    )


def _on_meta(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """A model without storage. Where one of its parts needs a library that is missing, its text model alone."""
    try:
        with torch.device("meta"):
            return model_classes.build(config, model_class)
    except ImportError:
        text = config.get_text_config(decoder=True)
        text_class = model_classes.model_class_of(text)
        if text is config or text_class is None:
            raise
        return _on_meta(text, text_class)


def _codes_of_paged_layers(model: PreTrainedModel) -> dict[type, AttentionCode]:
    cross = cross_attention_layers(model.config)
    return {type(m): code for m, code in writers(model) if getattr(m, "layer_idx", None) not in cross}


def _reasons(codes: dict[type, AttentionCode]) -> list[str]:
    if not codes:
        return ["no code was found that hands keys and values to the cache in a way that we know"]
    told = []
    for cls, code in codes.items():
        if not code.reaches_registry:
            told.append(f"{cls.__name__} has attention code of its own, which transformers' registry does not reach")
        elif code.heeds_name:
            told.append(f"{cls.__name__} does what it does only under the names of transformers' own attention")
        elif not code.hands_over:
            told.append(f"{cls.__name__} changes keys and values between the cache and the attention function")
        elif not code.keeps_mask:
            told.append(f"{cls.__name__} makes a mask or a position bias of its own")
    return told


def _reasons_of_layers(config: PreTrainedConfig) -> list[str]:
    chunk = compat.chunk_size(config)
    if chunk is None:
        return []
    return [
        f"layers with chunked attention take the dense view once a context is longer than a chunk of {chunk} tokens"
    ]


def _notes(model: PreTrainedModel) -> tuple[str, ...]:
    if not model_classes.has_blocks_of_images(model):
        return ()
    return ("tokens of a picture may see all of it: the step that brings them takes the dense view",)


def _count_layers(config: PreTrainedConfig) -> dict[str, int]:
    try:
        layers = compat.default_layers(config)
    except (AttributeError, ValueError):
        return {}
    chunk = compat.chunk_size(config)
    return dict(Counter(_kind(layer, chunk) for layer in layers))


def _kind(layer: Any, chunk: int | None) -> str:
    """transformers keeps chunked attention in layers with a window of the chunk's size."""
    name, window = type(layer).__name__, getattr(layer, "sliding_window", None)
    if window is not None and window == chunk:
        return f"chunked attention, chunks of {chunk}"
    return _KINDS.get(name, f"{name} (not paged)").format(window=window)
