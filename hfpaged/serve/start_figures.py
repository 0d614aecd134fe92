"""What there is to tell at the start: where the memory went, and how much fits."""

from __future__ import annotations

from typing import Any

from hfpaged.compat import model_name
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.serve.options import ServeOptions
from hfpaged.tensor_parallel import weights_bytes


def figures(batcher: ContinuousBatcher, options: ServeOptions, url: str) -> dict[str, Any]:
    """Bytes and counts, None for what was not measured."""
    told = batcher.describe()
    return {
        "model": (options.served_model_names or (model_name(batcher.model),))[0],
        "device": told["devices"],
        "weights_bytes": weights_bytes(batcher.model),
        "ranks": told["ranks"],
        "activation_peak_bytes": told["activation_bytes"],
        "pool_bytes": told["pool_bytes"],
        "kv_format": told["kv_format"],
        "num_blocks": told["num_blocks"],
        "block_size": told["block_size"],
        "pool_tokens": told["pool_tokens"],
        "swap_bytes": told["swap_bytes"],
        "prefix_store": told["prefix_store"],
        "max_model_len": told["max_model_len"],
        "requests_of_max_length": told["requests_of_max_length"],
        "max_num_seqs": told["max_num_seqs"],
        "shadow": told["shadow"],
        "tenants": len(options.api_keys),
        "kv_events": None if options.kv_events is None else options.kv_events.endpoint,
        "url": url,
    }
