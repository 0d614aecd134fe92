"""What each of several ranks holds of the models in the folders of `sys.argv`: bytes of weights and of a block."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import two_ranks

import hfpaged
from hfpaged.compat import cache_argument
from hfpaged.tensor_parallel import load_model

TOKENS = torch.tensor([[5, 6, 7]])


def held(folder):
    """Weights count once where they are tied."""
    model = load_model(folder)
    cache = hfpaged.PagedCache(model, num_blocks=4)
    model.generate(TOKENS, max_new_tokens=2, do_sample=False, **{cache_argument(): cache})
    parts = {id(p): getattr(p, "_local_tensor", p) for p in model.parameters()}
    return {
        "weights": sum(part.nbytes for part in parts.values()),
        "block": cache.pool.storage.block_bytes,
        "heads": [stores[0].signature[0] for _, stores in sorted(cache.pool.layer_stores.items())],
    }


two_ranks.report({Path(folder).name: partial(held, folder) for folder in sys.argv[1:]})
