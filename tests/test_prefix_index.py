from __future__ import annotations

import random
from array import array

import pytest

from hfpaged import prefix_index
from hfpaged.block_hash import ExtraKey
from hfpaged.block_table import GONE
from hfpaged.prefix_index import PrefixIndex, common_length

SIZE = 4


def ids(*numbers):
    return array("q", numbers)


def index_of(windows=(None,), **options):
    return PrefixIndex(windows, SIZE, **options)


def published(index, tokens, blocks, root=None):
    """Publish the full blocks of `tokens`; blocks[i] are the ids of block i, one per layer group."""
    parent = root or index.root([])
    entries = []
    for number, own in enumerate(blocks):
        parent = index.publish(parent, tokens[number * SIZE : (number + 1) * SIZE], own)
        entries.append(parent)
    return entries


def matched(index, tokens, limit=None, root=None):
    """(block ids of the first layer group, tokens of a partial block)"""
    match = index.match(root or index.root([]), tokens, len(tokens) if limit is None else limit)
    return [entry.blocks[0] for entry in match.blocks], match.partial_length


TOKENS = ids(*range(100, 114))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, ([], 0)),
        (1, ([], 1)),
        (3, ([], 3)),
        (4, ([7], 0)),
        (5, ([7], 1)),
        (8, ([7, 8], 0)),
        (11, ([7, 8], 3)),
        (12, ([7, 8, 9], 0)),
        (14, ([7, 8, 9], 0)),
    ],
)
def test_the_longest_known_prefix_up_to_a_limit(limit, expected):
    index = index_of()
    published(index, TOKENS, [[7], [8], [9]])
    assert matched(index, TOKENS, limit) == expected
    assert index.match(index.root([]), TOKENS, limit).length(SIZE) == min(limit, 12)


@pytest.mark.parametrize("place", range(12))
def test_a_match_ends_at_the_first_token_that_differs(place):
    index = index_of()
    published(index, TOKENS, [[7], [8], [9]])
    other = TOKENS[:]
    other[place] = 5
    assert matched(index, other) == ([7, 8, 9][: place // SIZE], place % SIZE)


def test_equal_blocks_behind_different_ones_are_different():
    index = index_of()
    published(index, ids(1, 1, 1, 1, 9, 9, 9, 9), [[0], [1]])
    published(index, ids(2, 2, 2, 2, 9, 9, 9, 9), [[2], [3]])
    assert matched(index, ids(1, 1, 1, 1, 9, 9, 9, 9)) == ([0, 1], 0)
    assert matched(index, ids(2, 2, 2, 2, 9, 9, 9, 9)) == ([2, 3], 0)
    assert matched(index, ids(9, 9, 9, 9)) == ([], 0)


def test_the_partly_equal_block_with_the_most_tokens_is_chosen():
    index = index_of()
    for block, tokens in enumerate([ids(1, 2, 5, 5), ids(1, 2, 3, 5), ids(1, 5, 5, 5), ids(5, 2, 3, 4)]):
        published(index, tokens, [[block]])
    match = index.match(index.root([]), ids(1, 2, 3, 4), 4)
    assert (match.partial.blocks, match.partial_length) == ([1], 3)


def test_wide_items_match_by_whole_positions():
    index = index_of()
    root = index.root([], 5)
    items = array("q", range(5 * 8))
    published_items = [items[:20], items[20:]]
    parent = root
    for block, part in enumerate(published_items):
        parent = index.publish(parent, part, [block])
    other = items[:]
    other[5 * 6 + 2] = -1  # not the token id of position 6, but what else stands there
    match = index.match(root, other, 8)
    assert (len(match.blocks), match.partial_length) == (1, 2)
    assert index.match(index.root([]), ids(*range(8)), 8).length(SIZE) == 0


# Hash and compare


def test_equal_hashes_of_other_tokens_are_no_hit_and_are_counted():
    index = index_of(hash_function=lambda data: b"same")
    published(index, ids(1, 2, 3, 4), [[0]])
    assert matched(index, ids(1, 2, 3, 4)) == ([0], 0)
    assert index.counts.collisions == 0
    assert matched(index, ids(5, 6, 7, 8)) == ([], 0)
    assert index.counts.collisions == 1
    assert index.publish(index.root([]), ids(5, 6, 7, 8), [1]) is None
    assert index.counts.collisions == 2
    assert index.held() == {0}


def test_with_one_hash_for_everything_no_hit_is_ever_wrong():
    index = index_of(hash_function=lambda data: b"same")
    draw = random.Random(0)
    contents = {}
    for block in range(200):
        tokens = ids(*(draw.randrange(2) for _ in range(3 * SIZE)))
        root = index.root([ExtraKey("salt", str(draw.randrange(3)))])
        match = index.match(root, tokens, 3 * SIZE)
        for number, entry in enumerate(match.blocks):
            assert contents[entry.blocks[0]] == (root.keys, tokens[: (number + 1) * SIZE])
        parent = match.blocks[-1] if match.blocks else root
        start = len(match.blocks) * SIZE
        if start < len(tokens) and index.publish(parent, tokens[start : start + SIZE], [block]):
            contents.setdefault(block, (root.keys, tokens[: start + SIZE]))
    assert index.counts.collisions > 50


# Roots


def test_roots_differ_by_kind_and_value_and_width_not_by_order():
    index = index_of()
    salt, adapter = ExtraKey("salt", "x"), ExtraKey("adapter", "x")
    published(index, TOKENS, [[0]], index.root([salt, adapter]))
    assert matched(index, TOKENS[:4], root=index.root([adapter, salt])) == ([0], 0)
    for other in ([salt], [adapter], [], [salt, adapter, salt], [ExtraKey("salt", "y"), adapter]):
        assert matched(index, TOKENS[:4], root=index.root(other)) == ([], 0)
    assert index.root([salt, adapter], 5) is not index.root([salt, adapter])
    assert index.root([salt, adapter]).value("salt") == "x"
    assert index.root([salt]).value("adapter") is None


def test_a_root_without_blocks_is_not_kept_and_the_last_used_comes_first():
    index = index_of()
    roots = [index.root([ExtraKey("salt", name)]) for name in "abc"]
    assert index.roots == []
    for block, root in enumerate(roots):
        published(index, TOKENS, [[block]], root)
    assert index.roots == roots[::-1]
    assert index.root([ExtraKey("salt", "b")]) is roots[1]
    assert index.roots[0] is roots[1]


def test_two_roots_made_for_equal_keys_before_anything_was_published_are_one():
    index = index_of()
    first, second = index.root([]), index.root([])
    published(index, TOKENS, [[0]], first)
    published(index, TOKENS[4:], [[1]], second)
    for root in (first, second, index.root([])):
        assert matched(index, TOKENS[:4], root=root) == ([0], 0)
        assert matched(index, TOKENS[4:8], root=root) == ([1], 0)
    assert len(index.roots) == 1


# Publishing and forgetting


def test_the_first_to_publish_wins_and_gaps_are_filled():
    index = index_of([None, None])
    (entry,) = published(index, TOKENS, [[3, GONE]])
    assert published(index, TOKENS, [[4, 5]]) == [entry]
    assert entry.blocks == [3, 5]
    assert index.held() == {3, 5}


def test_a_block_id_is_published_in_one_place_only():
    index = index_of()
    published(index, TOKENS, [[3]])
    (entry,) = published(index, TOKENS[4:], [[3]])
    assert entry.blocks == [GONE]
    assert index.held() == {3}
    index.forget(3)
    assert index.held() == set()


def test_an_evicted_block_ends_the_match_and_is_remembered_until_it_is_published_again():
    now = iter([50.0, 60.0])
    index = index_of(clock=lambda: next(now))
    entries = published(index, TOKENS, [[0], [1], [2]])
    index.forget(1)
    assert (entries[1].evicted_at, entries[1].is_gone, index.counts.evictions, index.num_ghosts) == (50.0, True, 1, 1)
    assert matched(index, TOKENS) == ([0], 0)
    assert published(index, TOKENS, [[0], [9]]) == entries[:2]
    assert (entries[1].evicted_at, index.num_ghosts) == (None, 0)
    assert matched(index, TOKENS) == ([0, 9, 2], 0)


def test_with_several_groups_a_block_is_gone_with_its_last_one():
    index = index_of([None, 6])
    (entry,) = published(index, TOKENS, [[0, 1]])
    index.forget(0)
    assert not entry.is_gone
    assert entry.evicted_at is not None  # of one group: what needs it cannot be used any more
    index.forget(1)
    assert entry.is_gone
    assert index.counts.evictions == 2


# Windows


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 12, 13, 100])
def test_a_hit_needs_just_the_blocks_that_its_next_token_sees(window):
    """Token n sees n - window + 1 .. n."""
    for held in range(8):  # which of the three blocks the group still has
        index = index_of([window])
        published(index, TOKENS, [[number if held >> number & 1 else GONE] for number in range(3)])
        expected = 0
        for count in (1, 2, 3):
            first = max(count * SIZE - window + 1, 0)
            if all(held >> block & 1 for block in range(first // SIZE, count)):
                expected = count
        assert len(index.match(index.root([]), TOKENS, 12).blocks) == expected, (window, held)


def test_full_and_windowed_groups_must_agree():
    index = index_of([None, 4])
    entries = published(index, TOKENS, [[0, 10], [1, 11], [2, 12]])
    assert len(index.match(index.root([]), TOKENS, 12).blocks) == 3
    index.forget(12)
    assert len(index.match(index.root([]), TOKENS, 12).blocks) == 2
    index.forget(10)
    assert len(index.match(index.root([]), TOKENS, 12).blocks) == 2
    index.forget(1)
    assert index.match(index.root([]), TOKENS, 12).blocks == []
    assert entries[0].blocks == [0, GONE]


def test_a_block_that_left_its_window_before_it_was_published_is_a_ghost_at_once(monkeypatch):
    monkeypatch.setattr(prefix_index, "REMEMBERED", 3)
    index = index_of([2])
    for number in range(50):
        published(index, ids(number, *range(7)), [[GONE], [GONE]])
    assert index.num_ghosts <= 3
    assert sum(1 + len(entry.children) for root in index.roots for entry in root.children.values()) <= 3


# Bounds


def entries_of(index):
    found, rest = [], [entry for root in index.roots for entry in root.children.values()]
    while rest:
        entry = rest.pop()
        found.append(entry)
        rest += entry.children.values()
    return found


def test_one_endless_text_of_a_layer_with_a_window_costs_no_more_per_block_at_its_end(monkeypatch):
    """Its first blocks are gone and lead to those that are there; when those go, all of it can be forgotten."""
    monkeypatch.setattr(prefix_index, "REMEMBERED", 10)
    index = index_of([6])
    parent = index.root([])
    for block in range(3000):
        parent = index.publish(parent, ids(block, 0, 0, 0), [block % 5])
        if block >= 4:
            index.forget((block + 1) % 5)
    assert index.num_ghosts == 2996
    for block in sorted(index.held()):
        index.forget(block)
    assert index.num_ghosts == len(entries_of(index)) == 10


def test_a_sequence_whose_place_was_forgotten_publishes_nothing_behind_it(monkeypatch):
    monkeypatch.setattr(prefix_index, "REMEMBERED", 0)
    index = index_of()
    (entry,) = published(index, TOKENS, [[0]])
    index.forget(0)
    assert index.roots == []
    assert index.publish(entry, TOKENS[4:8], [1]) is None
    assert index.held() == set()
    again = published(index, TOKENS, [[2]])
    assert index.publish(entry, TOKENS[4:8], [1]) is None
    assert again != [entry]
    assert entries_of(index) == again


def test_a_root_is_forgotten_with_its_last_block(monkeypatch):
    monkeypatch.setattr(prefix_index, "REMEMBERED", 0)
    index = index_of()
    old = index.root([])
    published(index, TOKENS, [[0]], old)
    index.forget(0)
    new = index.root([])
    published(index, TOKENS, [[1], [2]], new)
    assert matched(index, TOKENS, root=old) == ([1, 2], 0)
    assert index.roots == [new]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64])
def test_common_length_counts_equal_numbers_at_the_beginning(length):
    draw = random.Random(length)
    first = ids(*(draw.randrange(5) for _ in range(length)))
    for place in range(length):
        second = first[:]
        second[place] += 1
        assert common_length(first, second) == common_length(second, first) == place
    assert common_length(first, first + ids(1)) == common_length(first, first) == length
