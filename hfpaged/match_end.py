"""Why a match ended, noted in the moment in which it did: soon after, the prompt itself is published, and what had been
missing is there.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import islice

from hfpaged.block_table import GONE
from hfpaged.common_runs import common_length
from hfpaged.match_below import in_host_memory
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import Match, PrefixIndex

# Of the blocks that go on behind the match, so many of the newest are compared.
COMPARED = 256


@dataclass(frozen=True)
class MatchEnd:
    """Where and at what a match of at most `limit` tokens ended, `known` of which can be used.

    `lost`: there are blocks with the next tokens, but they cannot be used, because they were evicted (`evicted_at`) or
    (None) had left their windows; `host_tokens` of them lie in host memory. `nearest`: the known block that goes on
    most like the prompt, for `common` tokens from the last full block on. At `time` the blocks up to number
    `num_created` were known.
    """

    known: int
    limit: int
    num_created: int
    time: float
    lost: bool = False
    evicted_at: float | None = None
    nearest: PrefixBlock | None = None
    common: int = 0
    host_tokens: int = 0


def match_end(index: PrefixIndex, root: Root, items: array[int], limit: int, match: Match) -> MatchEnd:
    """The end of `match`, the longest known prefix of `items` (`root.width` numbers each); changes nothing."""
    end = MatchEnd(match.length(index.block_size), limit, index.num_created, index.clock())
    if end.known >= limit:
        return end
    if match.lost:
        below = in_host_memory(index, root, items, end.known, limit)
        return replace(end, lost=True, evicted_at=_first_eviction(match.lost), host_tokens=below)
    start = len(match.blocks) * index.block_size
    rest = items[start * root.width : min(limit, start + index.block_size) * root.width]
    parent = match.blocks[-1] if match.blocks else index.settled(root)
    nearest, common = _nearest(parent, rest, root.width)
    if nearest is not None and common * root.width == len(rest) and GONE in nearest.blocks:
        if nearest.below and end.known and common < index.block_size:  # only whole blocks come back, and all did
            return replace(end, limit=end.known)
        end = replace(end, lost=True, evicted_at=nearest.evicted_at)
    return replace(end, nearest=nearest, common=common)


def _first_eviction(lost: list[PrefixBlock]) -> float | None:
    return next((entry.evicted_at for entry in lost if entry.evicted_at is not None), None)


def _nearest(parent: PrefixBlock | Root, rest: array[int], width: int) -> tuple[PrefixBlock | None, int]:
    """The block behind `parent` that begins most like `rest`, among equals the newest, and with how many tokens."""
    best, most = next(reversed(parent.children.values()), None), 0
    for child in islice(reversed(parent.children.values()), COMPARED):
        if most * width == len(rest):
            break
        if child.items[most * width] == rest[most * width]:  # else it cannot be better than the best so far
            length = common_length(child.items, rest) // width
            best, most = (child, length) if length > most else (best, most)
    return best, most
