"""What a cache is made for and on: the config of a model that can be paged, and a pool, new or another cache's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hfpaged import compat
from hfpaged.errors import CacheMismatchError, InvalidConfigError, UnsupportedModelError
from hfpaged.kv_format import KVFormat, resolve_format
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import group_layers
from hfpaged.pageable import why_refused, windows_of


def config_of(model: nn.Module | None, config: PreTrainedConfig | None) -> PreTrainedConfig:
    """The config of whichever of the two is given. Raises InvalidConfigError."""
    if isinstance(model, PreTrainedConfig):
        raise InvalidConfigError("PagedCache was given a config in the place of a model; write PagedCache(config=...)")
    if (model is None) == (config is None):
        raise InvalidConfigError("PagedCache needs either a model or config=model.config, and not both")
    return config if model is None else compat.transformers_model(model).config


def is_encoder_decoder(config: PreTrainedConfig) -> bool:
    """Whether the cache must be wrapped, one for self and one for cross attention."""
    return bool(getattr(config, "is_encoder_decoder", False))


def check_pageable(model: nn.Module | None, config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError for a model that works with no bare cache of ours."""
    if model is not None and is_encoder_decoder(config):
        raise UnsupportedModelError(compat.WRAP)
    refusal = why_refused(config, None if model is None else type(compat.transformers_model(model)))
    if refusal is not None:
        raise UnsupportedModelError(refusal.reason)


def pool_for(
    config: PreTrainedConfig, layers: list[Any], pool: KVPool | None, *, block_size: int,
    kv_dtype: str | torch.dtype | KVFormat, memory: int | str | None, num_blocks: int | None,
) -> KVPool:  # fmt: skip
    """A new pool for those of transformers' `layers` that can be paged, or the given one if it fits them.

    Raises InvalidConfigError, CacheMismatchError for the pool of another model.
    """
    groups = group_layers(windows_of(config, layers))
    if pool is None:
        kv_format = resolve_format(kv_dtype)
        return KVPool(groups, block_size=block_size, kv_format=kv_format, memory=memory, num_blocks=num_blocks)
    if (memory, num_blocks) != (None, None):
        raise InvalidConfigError("pool= brings its own size; leave memory= and num_blocks= out")
    if pool.groups != groups:
        raise CacheMismatchError(
            f"the pool was made for layer groups {pool.groups}, this model has {groups}: "
            "caches on one pool must be of one model"
        )
    return pool
