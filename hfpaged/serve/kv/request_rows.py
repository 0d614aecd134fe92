"""Requests that run or wait, one record each; those of other tenants without what would tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hfpaged.clock import now
from hfpaged.engine.request import Request
from hfpaged.serve.kv.block_runs import Holder

MOST_ROWS = 512
HIDDEN = dict.fromkeys(("id", "tenant", "prompt_tokens", "generated_tokens", "cached_tokens", "age_seconds"))


class Eyes:
    """What one caller may see: without API keys everything, else of other tenants only how much memory they take."""

    def __init__(self, tenant: str, *, sees_all: bool) -> None:
        self.tenant, self.sees_all = tenant, sees_all

    def may_see(self, tenant: str) -> bool:
        """Whether requests of `tenant` are his."""
        return self.sees_all or tenant == self.tenant


def request_rows(
    requests: Iterable[Request], holders: Iterable[Holder], block_bytes: int, eyes: Eyes
) -> list[dict[str, Any]]:
    """Those that hold blocks first, then those that wait, each in the order in which they came."""
    held = {holder.name: holder for holder in holders if holder.kind == "request"}
    open_ones = sorted((each for each in requests if not each.is_finished), key=lambda each: each.number)
    rows = [_row(request, held.get(request.request_id), block_bytes, eyes) for request in open_ones]
    return sorted(rows, key=lambda row: row["state"] != "running")


def _row(request: Request, holder: Holder | None, block_bytes: int, eyes: Eyes) -> dict[str, Any]:
    blocks, shared = (0, 0) if holder is None else (len(holder.blocks), holder.shared)
    waits = "preempted" if request.preemptions else "waiting"
    row = {
        "id": request.request_id,
        "tenant": request.tenant,
        "is_hidden": False,
        "state": waits if holder is None else "running",
        "prompt_tokens": request.num_prompt_tokens,
        "generated_tokens": request.num_new,
        "cached_tokens": request.num_cached_tokens,
        "blocks": blocks,
        "kv_bytes": {"own": (blocks - shared) * block_bytes, "shared": shared * block_bytes},
        "age_seconds": now() - request.arrival_time,
    }
    return row if eyes.may_see(request.tenant) else {**row, **HIDDEN, "is_hidden": True}
