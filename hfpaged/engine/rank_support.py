"""What a batcher can do whose model several ranks compute together, and what all of them must have alike."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hfpaged import compat
from hfpaged.adapter_choice import AdapterChoices
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.sizing import PoolSizing, Sizing
from hfpaged.engine.spec import EngineSpec
from hfpaged.errors import InvalidConfigError, UnsupportedModelError
from hfpaged.kv_format import resolve_format
from hfpaged.kv_pool import KVPool
from hfpaged.ranks import Ranks, check_same, digest, smallest


def check_ranks(ranks: Ranks | None, model: nn.Module, pool: KVPool | None, spec: EngineSpec) -> None:
    """Raises InvalidConfigError for what cannot be done over several ranks, RanksDifferError for what they do not have
    alike.
    """
    if ranks is None:
        return
    choices = AdapterChoices(model)
    refused = {
        "pool=": (pool is not None, "caches of its own would put other blocks on the other ranks; leave it out"),
        "kv_scales=": (spec.kv_scales is not None, "the scales of a file are those of all heads; leave it out"),
        "cuda_graphs=": (bool(spec.cuda_graphs), "a graph holds no step of another process; leave it out"),
        "shadow=": (spec.shadow > 0, "its forwards with the native cache are rank 0's alone; leave it out"),
        "prepack=True": (spec.prepack is True, "weights in parts are not reordered; leave it out"),
        "adapters": (
            bool(choices.names or choices.faults),
            "which one acts is chosen on rank 0 alone; merge the adapter into the model, or unload it",
        ),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise InvalidConfigError(f"{name} with a model that {ranks.size} ranks compute together: {why}")
    check_same(
        ranks, "the model or the settings of a batcher", _alike(model, spec), "give all of them the same arguments"
    )


def _alike(model: nn.Module, spec: EngineSpec) -> int:
    """A number for what decides about the forwards by which a batcher is tried out, and about what lies in blocks."""
    is_given = spec.num_blocks is not None, isinstance(spec.memory, (int, str))
    sizes = spec.block_size, resolve_format(spec.kv_dtype).title, spec.max_num_batched_tokens, spec.max_model_len
    return digest(repr((type(compat.transformers_model(model)).__name__, is_given, sizes)).encode())


def check_runner(ranks: Ranks | None, runner: ModelRunner) -> None:
    """Raises UnsupportedModelError for models of which the other ranks cannot be told enough."""
    if ranks is not None and runner.cache.keeps_state:
        raise UnsupportedModelError(
            f"layers of this {type(runner.model).__name__} keep a state beside keys and values, and {ranks.size} ranks "
            "would have to keep it for each sequence; use generate(past_key_values=PagedCache(model)), on every rank"
        )


def shared_sizing(ranks: Ranks | None, sizing: Sizing | None, device: str) -> Sizing | None:
    """What the pool of each rank gets where it was promised a share: ranks on one CPU divide it, and all take as much
    as the one that has the least.
    """
    if ranks is None or not isinstance(sizing, PoolSizing):  # no rank has layers on several devices
        return sizing
    own = replace(sizing, sharers=ranks.on_host if device == "cpu" else 1)
    return replace(own, most=smallest(ranks, own.left))


def share_pool(ranks: Ranks | None, pool: KVPool) -> None:
    """All ranks have as many blocks as the one that has the fewest, and no cache of its own comes between."""
    if ranks is not None:
        pool.blocks.num_blocks = smallest(ranks, pool.num_blocks)
        pool.is_of_several_ranks = True
