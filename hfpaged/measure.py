"""What every comparison with plain transformers needs: fair timing, and the bytes of a plain cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import DynamicCache

T = TypeVar("T")


@dataclass(frozen=True)
class KVBytes:
    """KV memory of one cache: `live` belongs to tokens, `reserved` is taken from the machine."""

    live: int
    reserved: int


def in_turn(number: int, sides: Sequence[T]) -> Iterable[T]:
    """The sides in their order for turn `number`: each is the first of a pair in every other turn."""
    return sides if number % 2 == 0 else reversed(sides)


def alternate(runs: Mapping[str, Callable[[], T]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each run, turn by turn, so that a busy or warming machine slows all of them alike.

    A run must wait for its own result (on a GPU: copy something back), or only its launch is timed.
    """
    for _ in range(warmup):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name, run in in_turn(number, list(runs.items())):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def dynamic_kv_bytes(cache: DynamicCache, padding: Sequence[int]) -> KVBytes:
    """Bytes of a DynamicCache's keys and values; `padding` counts each row's tokens of left padding.

    Padding is stored like any token, so it is reserved but not live.
    """
    reserved, live = 0, 0.0
    length = cache.get_seq_length()
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        size = layer.keys.nbytes + layer.values.nbytes
        held = layer.keys.shape[-2]
        # A sliding layer keeps the last positions only, and padding leaves it first.
        padded = sum(max(0, count - (length - held)) for count in padding)
        reserved += size
        live += size * (1 - padded / (len(padding) * held))
    return KVBytes(round(live), reserved)
