"""That all ranks of a model compute the same tokens: looked at before each forward that a patched model makes.

Each rank draws its own tokens from the same logits, with its own generator. One that was seeded otherwise, or was given
another prompt or another kind of cache, would go another way than the rest, and all would wait for one another, or
compute nonsense together.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from hfpaged import compat_sharding
from hfpaged.cache_pool import join_ranks
from hfpaged.kv_pool import KVPool
from hfpaged.ranks import Ranks, check_same, digest, ranges
from hfpaged.tensor_parallel import ranks_of

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache

logger = logging.getLogger("hfpaged")
_told: weakref.WeakKeyDictionary[KVPool, tuple[int, int]] = weakref.WeakKeyDictionary()  # of which pools it was said
_WHAT = "the tokens, or the caches, of this forward"
_REMEDY = (
    "give all ranks the same prompts, the same settings (no max_time, which is over at another token on each) and "
    "caches made alike, and call torch.manual_seed with one number before sampling"
)


def check_ranks(cache: PagedCache, model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """One exchange of two numbers. Raises RanksDifferError, on all ranks, where the inputs of the forward differ."""
    if cache.pool.ranks is None and compat_sharding.tp_size(model) > 1:  # made of a config, which knows no ranks
        join_ranks(cache.pool, ranks_of(model))
    ranks = cache.pool.ranks
    if ranks is None:
        return
    seen = _seen(cache, inputs)
    (low, high), (least, most) = ranges(ranks, [seen, cache.pool.num_free])
    if low != high:
        check_same(ranks, _WHAT, seen, _REMEDY)
    if least != most:
        _free_garbage(ranks, cache.pool)


def _seen(cache: PagedCache, inputs: Mapping[str, Any]) -> int:
    """A number for the cache and its length, the token ids and which of them are padding. Not for embeddings."""
    parts = [f"{cache.kind} {cache.get_seq_length()}".encode()]
    for name in ("input_ids", "inputs_embeds", "attention_mask"):
        given = inputs.get(name)
        if isinstance(given, Tensor):
            parts.append(f"{name} {tuple(given.shape)}".encode())
            if not given.is_floating_point():
                parts.append(given.detach().cpu().numpy().tobytes())
    return digest(*parts)


def _free_garbage(ranks: Ranks, pool: KVPool) -> None:
    """A cache that only a circle of references still holds has given its blocks back on some ranks and not on others,
    as it pleased their garbage collectors.
    """
    if pool in _told:
        return
    gc.collect()
    ((least, most),) = ranges(ranks, [pool.num_free])
    if least != most:
        _told[pool] = least, most
        logger.warning(
            "the pools of the ranks have %d to %d free blocks before a forward (this is %s): caches, pinned or loaded "
            "prefixes differ, and the fullest may run out of blocks alone; do the same on all ranks",
            least, most, ranks,
        )  # fmt: skip
