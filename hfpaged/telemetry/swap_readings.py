"""What the tiers below pools have counted."""

from __future__ import annotations

from hfpaged.swap_counts import SwapCounts
from hfpaged.telemetry.readings import Readings


def read_swaps(readings: Readings, name: str, swaps: SwapCounts) -> None:
    """Under the name of a model."""
    blocks_of = {
        "out": swaps.blocks_out, "kept": swaps.blocks_kept, "in": swaps.blocks_in, "dropped": swaps.blocks_dropped
    }  # fmt: skip
    for direction, blocks in blocks_of.items():
        readings.count(name, "hfpaged_kv_swapped_blocks_total", blocks, direction)
    for direction, size, seconds in (
        ("out", swaps.bytes_out, swaps.seconds_out), ("in", swaps.bytes_in, swaps.seconds_in)
    ):  # fmt: skip
        readings.count(name, "hfpaged_kv_swapped_bytes_total", size, direction)
        readings.count(name, "hfpaged_kv_swap_seconds_total", seconds, direction)
    readings.count(name, "hfpaged_kv_restored_tokens_total", swaps.tokens_in)
    readings.count(name, "hfpaged_kv_restores_declined_total", swaps.declined, "cost")
    readings.count(name, "hfpaged_kv_restores_declined_total", swaps.short, "room")
