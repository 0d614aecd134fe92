"""What a cache is made for and on: the config of a model that can be paged, and a pool, new or another cache's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hfpaged import compat
from hfpaged.errors import CacheMismatchError, InvalidConfigError, UnsupportedModelError
from hfpaged.fingerprint import model_keys
from hfpaged.kv_format import KVFormat, Spec, check_dims, has_static_scales, resolve_format, with_static_scales
from hfpaged.kv_pool import KVPool
from hfpaged.kv_scales import KVScales
from hfpaged.kv_storage import PartScales
from hfpaged.layer_groups import LayerGroup
from hfpaged.pageable import why_refused
from hfpaged.prefix_store_tier import add_prefix_store
from hfpaged.ranks import Ranks
from hfpaged.tensor_parallel import ranks_of
from hfpaged.tiers_spec import NO_TIERS, TiersSpec


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


@dataclass(frozen=True)
class PoolSpec:
    """What the user of a cache says of its pool; None and "auto" are what he did not say."""

    block_size: int
    memory: int | str | None
    num_blocks: int | None
    kv_dtype: Spec
    kv_scales: KVScales | str | os.PathLike[str] | None
    debug: bool | None = None
    below: TiersSpec = NO_TIERS


def pool_for(
    model: nn.Module | None, config: PreTrainedConfig, groups: tuple[LayerGroup, ...], pool: KVPool | None,
    spec: PoolSpec,
) -> KVPool:  # fmt: skip
    """A new pool for these layer groups, or the given one if it is for such.

    Raises InvalidConfigError, CacheMismatchError for the pool of another model or format, KVScalesError.
    """
    ranks = ranks_of(model)
    if pool is None:
        if spec.below.said and ranks is not None:
            raise InvalidConfigError(
                f"{spec.below.said}, and several processes compute this model: each would decide by its "
                "own measurements what comes back, and they must all compute the same tokens; leave it out"
            )
        kv_format, scales = _format(model, groups, spec)
        if dim := _head_dim(config):  # what the config does not tell is found out by the first key
            for each in kv_format.all:
                check_dims(each, dim, dim)
        pool = KVPool(
            groups, block_size=spec.block_size, kv_format=kv_format, memory=spec.memory, num_blocks=spec.num_blocks,
            scales=scales, debug=spec.debug, swap_space=spec.below.swap_space,
        )  # fmt: skip
        pool.ranks = ranks
        if spec.below.prefix_store is not None:
            add_prefix_store(pool, spec.below.prefix_store, spec.below.prefix_store_size)
        return pool
    if pool.is_of_several_ranks:
        raise InvalidConfigError(
            "pool= is that of a batcher whose model several ranks compute together, and another cache would put other "
            "blocks there on each of them; leave pool= out"
        )
    if (spec.memory, spec.num_blocks, spec.kv_scales) != (None, None, None):
        raise InvalidConfigError("pool= brings its own size and scales; leave memory=, num_blocks= and kv_scales= out")
    if spec.below.said:
        raise InvalidConfigError(
            f"pool= is there already, so {spec.below.said} comes too late; say it where the pool is made"
        )
    if spec.debug is not None and spec.debug != (pool.debug is not None):
        is_in = "in" if pool.debug else "not in"
        raise InvalidConfigError(
            f"debug={spec.debug}, and the pool is {is_in} debug mode; say it where the pool is made"
        )
    kv_format = resolve_format(spec.kv_dtype)
    if spec.kv_dtype != "auto" and kv_format != pool.kv_format:
        raise CacheMismatchError(
            f"kv_dtype={kv_format.title!r}, and the pool stores {pool.kv_format.title}: caches on one pool have one "
            "KV format; leave kv_dtype= out, or pool="
        )
    if pool.groups != groups:
        raise CacheMismatchError(
            f"the pool was made for layer groups {pool.groups}, this model has {groups}: "
            "caches on one pool must be of one model"
        )
    join_ranks(pool, ranks)
    return pool


def join_ranks(pool: KVPool, ranks: Ranks | None) -> None:
    """It is for a model that several processes compute, if `ranks` are some. Raises InvalidConfigError for tiers."""
    if ranks is not None and pool.swapping is not None:
        raise InvalidConfigError(
            f"the pool has host memory or a prefix store below it, and this is {ranks} of a model: each would decide "
            "by its own measurements what comes back, and they must all compute the same tokens; use another pool"
        )
    pool.ranks = pool.ranks or ranks


def _head_dim(config: PreTrainedConfig) -> int | None:
    """What a config says of the size of a head; None where keys and values may have others."""
    text = config.get_text_config(decoder=True)
    if "kv_lora_rank" in vars(text):
        return None

    def said(name: str) -> Any:
        return vars(text).get(text.attribute_map.get(name, name))  # a config by layer refuses to be asked as a whole

    dim, width, heads = said("head_dim"), said("hidden_size"), said("num_attention_heads")
    if dim is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        return width // heads
    return dim if isinstance(dim, int) else None


def _format(
    model: nn.Module | None, groups: tuple[LayerGroup, ...], spec: PoolSpec
) -> tuple[KVFormat, dict[int, PartScales]]:
    """The KV format, and the static scales of each layer where they are given."""
    if spec.kv_scales is None:
        return resolve_format(spec.kv_dtype), {}
    scales = spec.kv_scales if isinstance(spec.kv_scales, KVScales) else KVScales.load(spec.kv_scales)
    if model is None:
        raise InvalidConfigError("kv_scales= belong to the weights of one model; give the model, not its config alone")
    if (ranks := ranks_of(model)) is not None:
        raise InvalidConfigError(
            f"kv_scales= name the scales of all heads of the whole model, and this is {ranks} with heads of its own; "
            "leave kv_scales= out: fp8 then has one scale per token and head"
        )
    scales.check_model(model_keys(compat.transformers_model(model))[0].value)
    given = resolve_format(scales.kv_format if spec.kv_dtype == "auto" else spec.kv_dtype)
    kv_format = with_static_scales(given, scales.kv_format, scales.identity)
    layers = [layer for group in groups for layer in group.layers if has_static_scales(kv_format.of_layer(layer))]
    return kv_format, {layer: scales.scales(layer) for layer in layers}
