"""What the arguments of a call of generate(), by their names, and its result say about its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_SETTINGS = (
    "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "num_beams", "num_return_sequences",
)  # fmt: skip


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of generate() by their names, as far as anybody gives them by their places."""
    return dict(zip(("inputs", "generation_config"), args, strict=False)) | dict(kwargs)


def row_count(kwargs: Mapping[str, Any]) -> int:
    """Rows of prompts; 0 where nothing says it."""
    prompt = _prompt(kwargs)
    return 0 if prompt is None else int(prompt.shape[0])


def prompt_tokens(kwargs: Mapping[str, Any]) -> int:
    """Tokens of all prompts, padding not counted."""
    prompt, mask = _prompt(kwargs), kwargs.get("attention_mask")
    if prompt is None:
        return 0
    if isinstance(mask, Tensor) and mask.shape == prompt.shape[:2]:
        return int((mask != 0).sum())
    return int(prompt.shape[0] * prompt.shape[1])


def settings(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen, by the caller or the model's defaults. What is no number generate() will refuse."""
    chosen = {name: _chosen(model, kwargs, name) for name in _SETTINGS}
    return {name: value for name, value in chosen.items() if isinstance(value, Real)}


def wants_no_paged_cache(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that names no cache wants another kind of it, or none."""
    use_cache, kind = (_chosen(model, kwargs, name) for name in ("use_cache", "cache_implementation"))
    return use_cache is False or kind is not None


def count_new_tokens(model: PreTrainedModel, output: Any, kwargs: Mapping[str, Any]) -> int:
    """New tokens of all rows of generate()'s result, up to the first end-of-sequence token of each."""
    sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
    if not isinstance(sequences, Tensor) or sequences.ndim != 2:  # a custom_generate gives back what it likes
        return 0
    ids = _ids(kwargs)
    new = sequences[:, 0 if ids is None else ids.shape[1] :]
    ends = _ends(model, kwargs, new.device)
    if ends is None:
        return new.numel()
    is_end = torch.isin(new, ends)
    return int((is_end.cumsum(1) - is_end.long() == 0).sum())


def _chosen(model: PreTrainedModel, kwargs: Mapping[str, Any], name: str) -> Any:
    return kwargs.get(name, getattr(kwargs.get("generation_config") or model.generation_config, name, None))


def _ends(model: PreTrainedModel, kwargs: Mapping[str, Any], device: torch.device) -> Tensor | None:
    config = kwargs.get("generation_config") or model.generation_config
    given = kwargs.get("eos_token_id", getattr(config, "eos_token_id", None))
    given = model.generation_config.eos_token_id if given is None else given
    return None if given is None else torch.as_tensor(given, device=device).flatten()


def _ids(kwargs: Mapping[str, Any]) -> Tensor | None:
    given = kwargs.get("inputs")
    given = kwargs.get("input_ids") if given is None else given
    return given if isinstance(given, Tensor) and given.ndim == 2 else None


def _prompt(kwargs: Mapping[str, Any]) -> Tensor | None:
    """[rows, length] or [rows, length, width]"""
    ids, embeddings = _ids(kwargs), kwargs.get("inputs_embeds")
    return embeddings if ids is None and isinstance(embeddings, Tensor) else ids
