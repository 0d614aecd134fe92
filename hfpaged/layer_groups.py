"""Layer groups: the layers that share a lifetime rule get block tables of their own over one free list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroup:
    """Layers with one block table per sequence. `window` is None for full attention.

    The layer at place i of every group stores its blocks in the same tensor (block ids are distinct), so that a
    block of any group costs the same bytes and no memory is split in advance between full and sliding layers.
    """

    window: int | None
    layers: tuple[int, ...]


def visible_offset(past_length: int, window: int | None) -> int:
    """The first position that the token behind `past_length` others sees."""
    return 0 if window is None else max(past_length - window + 1, 0)


def group_layers(windows: Mapping[int, int | None]) -> tuple[LayerGroup, ...]:
    """Group layers (layer index -> window) by window, in chunks of one common size.

    The size is the number of layers of one of the windows: the one that leaves the fewest places of the last
    chunks empty, and among equals the largest (fewer tables). As the hybrid cache of vLLM does.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in sorted(windows.items()):
        by_window.setdefault(window, []).append(layer)
    if not by_window:
        return ()
    counts = [len(layers) for layers in by_window.values()]
    size = min(set(counts), key=lambda size: (sum(-count % size for count in counts), -size))
    return tuple(
        LayerGroup(window, tuple(layers[start : start + size]))
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    )
