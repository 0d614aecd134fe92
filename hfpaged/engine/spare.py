"""A runner of the model with a pool of its own, to try things out before the real pool is made, its size among them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hfpaged import compat
from hfpaged.cache_pool import PoolSpec
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.piece import Piece
from hfpaged.engine.sizing import Sizing, default_share, size_pool
from hfpaged.engine.spec import EngineSpec
from hfpaged.engine.trial import refusing
from hfpaged.live_pools import on_trial
from hfpaged.packed_cache import PackedCache
from hfpaged.tiers_spec import NO_TIERS, TiersSpec


def pool_spec(
    spec: EngineSpec, memory: int | str | None, num_blocks: int | None, below: TiersSpec = NO_TIERS
) -> PoolSpec:  # fmt: skip
    """What `spec` says of a pool with so much memory or so many blocks."""
    return PoolSpec(spec.block_size, memory, num_blocks, spec.kv_dtype, spec.kv_scales, spec.debug, below)


def spare_runner(model: nn.Module, spec: EngineSpec) -> ModelRunner:
    """To try something out, with more blocks than that will need: storage grows as it is used."""
    with on_trial():
        return ModelRunner(model, PackedCache(model, None, pool_spec(spec, None, num_blocks=10**6)))


def size_by_trial(model: nn.Module, spec: EngineSpec) -> Sizing | None:
    """What the pool may take of the device; None where its bytes are given."""
    if isinstance(spec.memory, (int, str)):
        return None
    runner = spare_runner(model, spec)
    cache = runner.cache

    def forward(count: int) -> Mapping[torch.device, int]:
        manager = cache.pool.manager
        piece = Piece(manager.create(), 0, [0] * count, 1)
        try:
            with refusing(runner):
                runner.forward([piece])
            return cache.state_bytes(piece.blocks)
        finally:
            manager.free(piece.blocks)

    def share(device: torch.device) -> float:
        return default_share(device) if spec.memory is None else float(spec.memory)

    longest = longest_of(model, spec) or spec.max_num_batched_tokens
    tokens = min(spec.max_num_batched_tokens, longest)
    return size_pool(
        share, lambda: cache.pool.storage.block_bytes_by_device or {runner.device: 0}, forward, tokens,
        spec.max_num_seqs,
    )  # fmt: skip


def longest_of(model: nn.Module, spec: EngineSpec) -> int | None:
    """Tokens of the longest sequence; None where neither the user nor the config names it."""
    text = compat.transformers_model(model).config.get_text_config(decoder=True)
    return spec.max_model_len or getattr(text, "max_position_embeddings", None)
