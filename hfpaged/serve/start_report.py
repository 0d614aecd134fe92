"""How it is told at the start where the memory went, how much fits, and where the server is."""

from __future__ import annotations

import logging
from typing import Any

from rich.console import Console
from rich.table import Table

from hfpaged.config import format_bytes

logger = logging.getLogger("hfpaged")


def show(told: dict[str, Any], console: Console) -> None:
    """As one table."""
    table = Table(title=f"hfpaged serves {told['model']} on {told['device']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for row in _rows(told):
        table.add_row(*row)
    console.print(table)


def log(told: dict[str, Any]) -> None:
    """As one record."""
    logger.info("%s starts on %s", told["model"], told["url"], extra={"fields": told})


def _rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    peak = told["activation_peak_bytes"]
    return [
        *([("replicas", f"{told['replicas']}; each has:")] if "replicas" in told else []),
        *([("tensor parallel", f"{told['ranks']} ranks; each has:")] if told.get("ranks", 1) > 1 else []),
        ("weights", format_bytes(told["weights_bytes"])),
        ("activation peak", "not measured, as the pool's size was given" if peak is None else format_bytes(peak)),
        ("pool", f"{format_bytes(told['pool_bytes'])} ({told['kv_format']})"),
        ("blocks", f"{told['num_blocks']:,} of {told['block_size']} tokens"),
        ("tokens", f"{told['pool_tokens']:,}"),
        *([("swap space", f"{format_bytes(told['swap_bytes'])} of host memory")] if told["swap_bytes"] else []),
        *([("prefix store", told["prefix_store"])] if told["prefix_store"] else []),
        ("requests that fit", _fitting(told["requests_of_max_length"], told["max_model_len"])),
        ("sequences in a step", f"at most {told['max_num_seqs']:,}"),
        *([("shadow decoding", f"{100 * told['shadow']:g} % of the requests")] if told["shadow"] else []),
        ("API keys", f"{told['tenants']}" if told["tenants"] else "none: everybody is let in"),
        *([("block events", told["kv_events"])] if told["kv_events"] else []),
        ("address", told["url"]),
    ]


def _fitting(count: int | None, longest: int | None) -> str:
    if count is None or longest is None:
        return "of any length, as far as there are blocks"
    words = f"{count:,} of {longest:,} tokens, the longest"
    return words if count else f"{words}: give the pool more, or set --max-model-len"
