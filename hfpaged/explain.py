"""Why a prompt was known as far as it was: facts from the prefix index, and the record that says them.

Nothing here changes the index or the pool. Facts are gathered while nobody else changes them, texts are decoded later.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from hfpaged.block_hash import ExtraKey, salt_key
from hfpaged.common_runs import common_length, long_runs
from hfpaged.match_end import MatchEnd, match_end
from hfpaged.piece_kind import differing_pieces
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import PrefixIndex
from hfpaged.prefix_report import PrefixReport, TokenDifference

# How far behind a difference the tokens are compared.
COMPARED = 8192
# Tokens on both sides of a difference: to see what it is (a UUID is up to 36), and to show.
LOOKED_AT, SHOWN = 48, 8
# Of many blocks behind one, so many of the newest are compared, by runs of GRAM tokens.
BRANCHES, GRAM = 32, 4
# With more roots than that (tenants with salts) a reason that is only counted does not ask them all.
FEW_ROOTS = 32


class Decoder(Protocol):
    """A tokenizer, as far as explanations need one."""

    def decode(self, token_ids: Any, /) -> Any: ...


@dataclass(frozen=True)
class Facts:
    """A report without its texts, and the token ids to make them of: the prompt's, and from the difference on those of
    the known prompt.
    """

    report: PrefixReport
    here: Many[int] = ()
    known: Many[int] = ()

    def with_texts(self, tokenizer: Decoder | None) -> PrefixReport:
        difference = self.report.difference
        if tokenizer is None or difference is None or difference.kind or min(*self.here, *self.known) < 0:
            return self.report
        at = difference.position
        before, here = self.here[max(at - LOOKED_AT, 0) : at], self.here[at:]
        texts = [str(tokenizer.decode([*before, *part[:LOOKED_AT]])) for part in (here, self.known)]
        shown = [str(tokenizer.decode([*before[-SHOWN:], *part[:SHOWN]])) for part in (here, self.known)]
        pieces = differing_pieces(*texts)
        told = replace(
            difference, here_text=pieces.here, known_text=pieces.known, kind=pieces.kind,
            here_context=shown[0], known_context=shown[1],
        )  # fmt: skip
        return replace(self.report, difference=told)


def explain_prompt(
    index: PrefixIndex, token_ids: Many[int], salt: str | None, adapter: str | None, *, is_private: bool = False
) -> Facts:
    """What a prompt of these tokens would find now, with all else as in the forward that looked for a prefix last.
    `is_private`: nothing is told of what is known under other salts, for somebody who may only know his own.
    """
    root = _root_for(index, salt, adapter)
    items = _items_under(root, array("q", token_ids), index.block_size)
    limit = max(len(token_ids) - 1, 0)
    match = index.match(root, items, limit, counted=False)
    others = [other for other in index.roots if other.value("salt") == root.value("salt")] if is_private else None
    return explain_match(index, root, items, match_end(index, root, items, limit, match), others=others)


def explain_match(
    index: PrefixIndex, root: Root, items: array[int], end: MatchEnd, hits: int | None = None,
    others: Many[Root] | None = None,
) -> Facts:  # fmt: skip
    """Why a match of `items` (`root.width` numbers each) ended where it did, as of then; `hits`: see PrefixReport.
    `others` are the roots under which it is looked for too, all of them by default.
    """
    ids, size = items[:: root.width], index.block_size
    why = _why(index, root, items, end, ids, index.roots if others is None else others)
    report = PrefixReport(len(ids), end.known, end.known if hits is None else hits, why.reason, size)
    if why.reason == "other key":
        return Facts(replace(report, differing_keys=why.keys, other_tokens=why.others))
    if why.reason in ("evicted", "left window"):
        lost = replace(report, evicted_at=end.evicted_at, lost_tokens=why.reach - end.known)
        return Facts(replace(lost, host_tokens=min(end.host_tokens, lost.lost_tokens)))
    if why.reason != "differs":
        return Facts(report)
    assert end.nearest is not None
    position = end.known // size * size + end.common
    known = _continuation(end.nearest, ids[position:], end, root.width)[end.common :]
    return Facts(replace(report, difference=_difference(ids, known, position, size)), ids, known)


def match_reason(index: PrefixIndex, root: Root, items: array[int], end: MatchEnd) -> str:
    """The reason alone, see PrefixReport: quick, for counting. Of very many roots others are not looked at."""
    others = index.roots if index.num_roots <= FEW_ROOTS else []
    return _why(index, root, items, end, items[:: root.width], others).reason


class _Why(NamedTuple):
    """A reason; how many tokens could be known, and how many are for other `keys`."""

    reason: str
    reach: int = 0
    keys: tuple[str, ...] = ()
    others: int = 0


def _why(index: PrefixIndex, root: Root, items: array[int], end: MatchEnd, ids: array[int], roots: Many[Root]) -> _Why:
    root, size = index.settled(root), index.block_size
    if end.known >= end.limit:
        return _Why("complete")
    full = end.known // size * size
    position = full + end.common
    reach = max(position, _depth(root, items, 1, size, end) * size)
    keys, others = _known_elsewhere(roots, root, ids, end, size)
    if others >= reach + size:
        return _Why("other key", reach, keys, others)
    if end.lost:
        return _Why("left window" if end.evicted_at is None else "evicted", reach)
    if end.nearest is None or not 0 < position < end.limit:
        return _Why("below block size" if len(ids) - full < size else "never seen")
    return _Why("differs")


def _difference(ids: array[int], known: array[int], position: int, block_size: int) -> TokenDifference:
    runs = long_runs(ids[position : position + COMPARED], known)
    same = sum(run.length for run in runs)
    saved = (position + same) // block_size * block_size - position
    kind = "input" if ids[position] == known[0] else None
    return TokenDifference(position, ids[position], known[0], same, len(runs), max(saved, 0), kind=kind)


def _depth(root: Root, numbers: array[int], stride: int, block_size: int, end: MatchEnd, there: bool = False) -> int:
    """How many full blocks of `numbers` were known behind `root`, of whose numbers each `stride`-th counts; `there`:
    and had not been evicted.
    """
    size = block_size * root.width // stride
    parent: PrefixBlock | Root = root
    for depth in range(end.limit // block_size):
        wanted = numbers[depth * size : (depth + 1) * size]
        children = (c for c in parent.children.values() if c.items[0] == wanted[0] and c.number <= end.num_created)
        found = next((child for child in children if child.items[::stride] == wanted), None)
        if found is None or (there and found.is_gone and (found.evicted_at or 0) <= end.time):
            return depth
        parent = found
    return end.limit // block_size


def _known_elsewhere(
    roots: Many[Root], root: Root, ids: array[int], end: MatchEnd, block_size: int
) -> tuple[tuple[str, ...], int]:
    """(kinds of extra keys in which another root differs, tokens of the prompt that were known under it) for the root
    with most of them.
    """
    best: tuple[tuple[str, ...], int] = ((), 0)
    for other in roots:
        if other.keys != root.keys:
            tokens = _depth(other, ids, other.width, block_size, end, there=True) * block_size
            if tokens > best[1]:
                best = tuple(sorted({key.kind for key in {*root.keys} ^ {*other.keys}})), tokens
    return best


def _continuation(entry: PrefixBlock, ids: array[int], end: MatchEnd, width: int) -> array[int]:
    """The tokens of `entry` and of what was known behind it; of several ways the one that has most of `ids`."""
    wanted = _grams(ids[:COMPARED])
    known = entry.items[::width]
    while len(known) < COMPARED:
        children = [child for child in entry.children.values() if child.number <= end.num_created][-BRANCHES:]
        if not children:
            break
        if len(children) == 1:
            entry = children[0]
        else:
            entry = max(reversed(children), key=lambda child: len(wanted & _grams(child.items[::width])))
        known += entry.items[::width]
    return known


def _grams(ids: array[int]) -> set[bytes]:
    return {ids[start : start + GRAM].tobytes() for start in range(len(ids) - GRAM + 1)}


def _root_for(index: PrefixIndex, salt: str | None, adapter: str | None) -> Root:
    """The known root of these keys that was used last, or one that nothing is known under."""
    last = index.last_root or next(iter(index.roots), None)
    keys = {key for key in last.keys if not _is_of_prompt(key)} if last else set()
    keys |= {salt_key(salt)} if salt is not None else set()
    keys |= {ExtraKey("adapter", adapter)} if adapter is not None else set()
    fitting = (root for root in index.roots if {key for key in root.keys if key.kind != "width"} == keys)
    return next(fitting, Root(tuple(sorted({*keys, ExtraKey("width", "1")})), 1, b""))


def _is_of_prompt(key: ExtraKey) -> bool:
    """Whether an extra key may be another for each prompt."""
    return key.kind in ("adapter", "salt", "width") or key.kind.startswith("input:")


def _items_under(root: Root, ids: array[int], block_size: int) -> array[int]:
    """`ids` as `root` knows them: where it knows more of a position than its token id, that is assumed."""
    if root.width == 1:
        return ids
    items = array("q")
    parent: PrefixBlock | Root | None = root
    for start in range(0, len(ids), block_size):
        rest = ids[start : start + block_size]
        known = [] if parent is None else list(parent.children.values())
        lengths = [common_length(child.items[:: root.width], rest) for child in known]
        length = max(lengths, default=0)
        parent = known[lengths.index(length)] if length else None
        items += parent.items[: length * root.width] if parent is not None else array("q")
        for token in rest[length:]:
            items.extend([token] + [0] * (root.width - 1))
    return items
