"""The rule of StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), in blocks: what a row keeps of an endless text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from hfpaged.layer_groups import LayerGroup

DEFAULT_SINKS = 4  # what the paper found to be enough for all models that it tried


@dataclass(frozen=True)
class StreamRule:
    """Of one layer group a row keeps its first `kept` blocks, the sinks, and at least the last `window` tokens.

    blocks of the sequence   0   1   2   3   4   5
    held                     0           3   4   5     kept = 1, two blocks have been released
    """

    window: int
    kept: int


def chunk_size(window: int, block_size: int) -> int:
    """The most tokens of one forward behind the first `window`: a quarter of it in whole blocks, at least one."""
    return max(window // 4 // block_size, 1) * block_size


def stream_rules(
    groups: Many[LayerGroup], window: int, sinks: int, block_size: int
) -> tuple[StreamRule | None, ...] | None:
    """By layer group; None for one whose own window leaves no more than ours, and at all if that holds for each."""
    rule = StreamRule(window, -(-sinks // block_size))
    most = rule.kept * block_size + window + chunk_size(window, block_size)
    rules = tuple(rule if group.window is None or group.window > most else None for group in groups)
    return rules if any(rules) else None


@dataclass(frozen=True)
class SinkTokens:
    """The first tokens of a row: `ids` from position `start` on, whose keys are those of positions `shift` later."""

    ids: array[int]
    start: int
    shift: int = 0

    def cut(self, length: int) -> SinkTokens:
        """Of a row that was cut to its first `length` tokens."""
        return self if length >= len(self.ids) else replace(self, ids=self.ids[:length])

    def extended(self, ids: array[int]) -> SinkTokens:
        return replace(self, ids=self.ids + ids)

    def moved(self, shift: int) -> SinkTokens:
        return replace(self, shift=shift)
