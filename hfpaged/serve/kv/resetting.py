"""/v1/kv/reset: all prefixes are forgotten, or none."""

from __future__ import annotations

from hfpaged.kv_pool import KVPool
from hfpaged.serve.http_errors import ApiError


def forget_prefixes(pool: KVPool) -> int:
    """How many blocks kept one. Raises ApiError 409 while any block is in use: what it holds could be found again."""
    with pool.changing():
        in_use, cached = pool.blocks.num_used, pool.blocks.num_cached
        if not in_use:
            return pool.forget_cached()
    raise ApiError(
        409, f"{in_use} blocks of the pool are in use, by requests or pinned prefixes, and others could go on finding "
        f"what they hold; nothing was forgotten ({cached} blocks keep prefixes that nobody uses); try again when no "
        "request runs", code="blocks_in_use", headers={"Retry-After": "1"},
    )  # fmt: skip
