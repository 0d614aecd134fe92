from __future__ import annotations

import contextlib
import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hfpaged import prefix_index
from hfpaged.block_hash import ExtraKey, sha256
from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.block_table import GONE
from hfpaged.errors import IntegrityError, OutOfBlocksError, WindowPassedError
from hfpaged.layer_groups import visible_offset
from hfpaged.prefix_cache import PrefixCache
from hfpaged.token_chain import TokenChain

SIZE = 4


class Texts:
    """Sequences of tokens over one pool, driven as the rows of caches drive them, and what lies in each slot."""

    def __init__(self, num_blocks, windows=(None,), hash_function=sha256):
        self.pool = BlockPool(num_blocks)
        self.manager = BlockManager(self.pool, len(windows), SIZE, windows)
        self.prefixes = PrefixCache(self.manager, windows, hash_function)
        self.windows = windows
        self.slots = {}  # (layer group, slot) -> all tokens of the text up to the one that lies there
        self.texts = {}  # sequence -> its tokens
        self.roots = {}  # sequence -> its root

    def root(self, salt=""):
        return self.prefixes.index.root([ExtraKey("salt", salt)])

    def start(self, tokens, salt="", publish=True, limit=None):
        """A new sequence: begins with what is known and computes the rest. Returns (it, known tokens)."""
        items, root = array("q", tokens), self.root(salt)
        limit = max(len(tokens) - 1, 0) if limit is None else limit
        sequence = self.manager.create()
        known = self.prefixes.attach(sequence, root, items, self.prefixes.longest(root, items, limit))
        self.texts[sequence], self.roots[sequence] = list(tokens[:known]), root
        self.check(sequence)
        try:
            self.append(sequence, tokens[known:], publish)
        except OutOfBlocksError:
            self.free(sequence)
            raise
        return sequence, known

    def append(self, sequence, tokens, publish=True):
        if not tokens:
            return
        self.manager.release_left([sequence])
        copies = self.manager.grow([(sequence, len(tokens))])
        for group, of_group in enumerate(copies):
            for copy in of_group:
                for offset in range(SIZE):
                    content = self.slots.get((group, copy.source * SIZE + offset))
                    self.slots[group, copy.target * SIZE + offset] = content
        text = self.texts[sequence]
        for token in tokens:
            text.append(token)
            for group, table in enumerate(sequence.tables):
                slot = table.slot(len(text) - 1)
                assert self.pool.refcount(slot // SIZE) == 1, "a shared block is written"
                assert not self.pool.is_published(slot // SIZE), "a published block is written"
                self.slots[group, slot] = (self.roots[sequence].keys, tuple(text))
        if sequence.chain is not None:
            sequence.chain.items.extend(tokens)
        if publish:
            self.prefixes.publish(sequence)
        self.manager.release_left([sequence])

    def fork(self, sequence):
        child = self.manager.fork(sequence)
        self.texts[child], self.roots[child] = self.texts[sequence][:], self.roots[sequence]
        return child

    def trim(self, sequence, length):
        self.manager.check_trim(sequence, length)
        self.manager.trim(sequence, length)
        del self.texts[sequence][length:]

    def free(self, sequence):
        self.manager.free(sequence)
        del self.texts[sequence], self.roots[sequence]

    def free_all(self):
        for sequence in list(self.texts):
            self.free(sequence)

    def check(self, *sequences):
        """All that the next token of each sequence sees is what that text has there; the books agree."""
        for sequence in sequences or self.texts:
            text, keys = self.texts[sequence], self.roots[sequence].keys
            assert sequence.length == len(text)
            if sequence.chain is not None:
                assert sequence.chain.items.tolist() == text
            for group, (table, window) in enumerate(zip(sequence.tables, self.windows, strict=True)):
                for position in range(visible_offset(len(text), window), len(text)):
                    expected = (keys, tuple(text[: position + 1]))
                    assert self.slots[group, table.slot(position)] == expected, (group, position)
        self.manager.check_integrity()
        self.prefixes.check_integrity()


def text_of(length, seed=0):
    return [random.Random(f"{seed} {place}").randrange(1000) for place in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (None, 3, 9)], ids=str)
def test_a_text_that_comes_again_begins_with_all_but_its_last_token(windows, length):
    texts = Texts(40, windows)
    tokens = text_of(length)
    first, _ = texts.start(tokens + text_of(3, 1))
    texts.free(first)
    _, known = texts.start(tokens)
    assert known == min(length - 1, (length + 3) // SIZE * SIZE)
    texts.check()


def test_a_sequence_gives_its_own_block_back_where_another_published_the_same_tokens():
    texts = Texts(20)
    sequences = [texts.manager.create() for _ in range(3)]
    for sequence in sequences:  # in one batch, before any of them is published
        sequence.chain = TokenChain(texts.root())
        texts.texts[sequence], texts.roots[sequence] = [], texts.root()
        texts.append(sequence, text_of(10), publish=False)
    child = texts.fork(sequences[2])
    assert texts.pool.num_used == 9
    for sequence in sequences:
        texts.prefixes.publish(sequence)
        texts.check()
    assert texts.pool.num_used == 9 - 2  # the fork still holds those of its parent
    texts.prefixes.publish(child)
    assert texts.pool.num_used == 2 + 3
    assert [table.blocks[:2] for s in sequences for table in s.tables] == [sequences[0].tables[0].blocks[:2]] * 3
    texts.check()


@pytest.mark.parametrize("too_many", [1, -1])
def test_a_sequence_whose_tokens_and_slots_came_apart_is_never_found(too_many):
    texts = Texts(20)
    sequence = texts.manager.create()
    sequence.chain = TokenChain(texts.root(), array("q", text_of(10 + too_many)))
    texts.manager.grow([(sequence, 10)])
    texts.prefixes.publish(sequence)
    texts.manager.trim(sequence, 9)  # both are as long now, and not the same
    texts.prefixes.publish(sequence)
    assert texts.prefixes.index.num_blocks == 0


def test_the_end_of_a_match_inside_of_a_block_is_copied_before_it_is_written():
    texts = Texts(20)
    first, _ = texts.start(text_of(8))
    second, known = texts.start([*text_of(6), -1, -2])
    assert known == 6
    assert second.tables[0].blocks[0] == first.tables[0].blocks[0]
    assert second.tables[0].blocks[1] != first.tables[0].blocks[1]
    texts.check()


def test_what_is_not_published_is_not_found():
    texts = Texts(20)
    texts.start(text_of(12), publish=False)
    assert texts.start(text_of(12))[1] == 0
    assert texts.start(text_of(12), publish=False)[1] == 11
    texts.check()


def test_other_salts_find_nothing():
    texts = Texts(20)
    texts.start(text_of(12), "a")
    assert texts.start(text_of(12), "b")[1] == 0
    assert texts.start(text_of(12), "a")[1] == 11
    texts.check()


def test_a_constant_hash_gives_no_wrong_block():
    texts = Texts(60, hash_function=lambda data: b"same")
    for seed in range(8):
        for salt in ("a", "b"):
            sequence, _ = texts.start(text_of(12, seed), salt)
            texts.append(sequence, text_of(9, seed + 50))
            texts.check()
            texts.free(sequence)
    assert texts.prefixes.index.counts.collisions > 0


# Eviction


def test_the_tail_of_a_text_is_evicted_before_its_head_and_only_as_much_as_is_needed():
    for windows in ((None,), (None, 100)):
        groups = len(windows)
        texts = Texts(6 * groups, windows)
        sequence, _ = texts.start(text_of(5 * SIZE))
        texts.free(sequence)
        for needed in range(1, 6):
            taken = texts.manager.create()
            texts.manager.grow([(taken, needed * SIZE)])
            assert texts.pool.num_cached == 5 * groups - max(needed - 1, 0) * groups
            texts.manager.free(taken)
            texts.check()
            _, known = texts.start([*text_of(5 * SIZE), 1], publish=False, limit=5 * SIZE)
            assert known == (5 - max(needed - 1, 0)) * SIZE
            texts.free_all()


def test_the_hottest_of_fifty_system_prompts_is_never_lost_once_it_is_warm():
    """Zipf traffic over a pool that holds about twenty of them; no more is evicted than each request needs."""
    texts = Texts(20 * 10 + 8)
    draw = random.Random(0)
    prompts = [text_of(10 * SIZE, seed) for seed in range(50)]
    weights = [1 / (rank + 1) for rank in range(50)]
    counts = texts.prefixes.index.counts
    missed = 0
    computed = 0
    for request in range(1500):
        rank = draw.choices(range(50), weights)[0]
        before, free = counts.evictions, texts.pool.num_blocks - texts.pool.num_used - texts.pool.num_cached
        own = [request + 10_000 + place for place in range(draw.randrange(1, 4))]
        sequence, known = texts.start(prompts[rank] + own)
        needed = -(-sequence.length // SIZE) - known // SIZE
        assert counts.evictions - before <= max(needed - free, 0)
        missed += request >= 200 and rank == 0 and known < 10 * SIZE
        computed += sequence.length - known
        texts.free(sequence)
        if request % 100 == 0:
            texts.check()
    assert missed == 0
    assert texts.prefixes.index.num_blocks <= texts.pool.num_blocks
    assert computed < 0.5 * 1500 * 42


def test_a_hundred_thousand_blocks_leave_the_map_as_large_as_the_pool_and_what_is_remembered(monkeypatch):
    monkeypatch.setattr(prefix_index, "REMEMBERED", 50)
    texts = Texts(30)
    draw = random.Random(0)
    for number in range(7000):
        sequence = texts.manager.create()
        sequence.chain = TokenChain(texts.root(str(number % 3)), array("q", [draw.randrange(4) for _ in range(60)]))
        texts.manager.grow([(sequence, 60)])
        texts.prefixes.publish(sequence)
        texts.manager.free(sequence)
    index = texts.prefixes.index
    assert index.num_blocks <= 30
    assert index.num_ghosts <= 50
    rest, count = [entry for root in index.roots for entry in root.children.values()], 0
    while rest:
        count, rest = count + 1, [*rest[1:], *rest[0].children.values()]
    assert count <= 30 + 50
    assert index.counts.evictions > 90_000
    texts.check()


# Pins


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)], ids=str)
def test_a_pinned_prefix_is_never_evicted_until_it_is_unpinned(windows):
    texts = Texts(8 * len(windows), windows)
    sequence, _ = texts.start(text_of(10))
    items = array("q", text_of(10))
    assert texts.prefixes.pin(texts.root(), items) == 8
    texts.free(sequence)
    for seed in range(1, 5):
        sequence, _ = texts.start(text_of(20, seed))
        texts.free(sequence)
    assert texts.start([*text_of(8), 1], limit=8)[1] == 8
    texts.check()
    texts.free_all()
    assert texts.pool.num_used > 0
    assert texts.prefixes.pinned(items) == [texts.root()]
    assert texts.prefixes.unpin(texts.root(), items)
    assert not texts.prefixes.unpin(texts.root(), items)
    assert texts.pool.num_used == 0
    texts.check()


def test_pinning_again_renews_the_pin_and_pinning_what_nobody_knows_keeps_nothing():
    texts = Texts(20)
    items = array("q", text_of(12))
    for _ in range(3):
        assert texts.prefixes.pin(texts.root(), items) == 0
    assert texts.prefixes.pinned(items) == []
    texts.start(text_of(5))
    assert texts.prefixes.pin(texts.root(), items) == 4
    texts.start(text_of(12))
    assert texts.prefixes.pin(texts.root(), items) == 12
    texts.free_all()
    assert texts.pool.num_used == 3
    assert texts.prefixes.unpin(texts.root(), items)
    assert texts.pool.num_used == 0


def test_withdrawn_blocks_are_found_by_nobody_and_may_be_published_again():
    texts = Texts(20)
    sequence, _ = texts.start(text_of(12))
    texts.prefixes.withdraw(sequence.tables[0].blocks[1:])
    texts.check()
    assert texts.prefixes.longest(texts.root(), array("q", text_of(12)), 12).length(SIZE) == 4
    assert texts.start(text_of(12))[1] == 4
    texts.check()


def test_books_that_disagree_are_found():
    texts = Texts(20)
    sequence, _ = texts.start(text_of(8))
    texts.pool.withdraw(sequence.tables[0].blocks[0])
    with pytest.raises(IntegrityError, match=r"published blocks \[1\], the index knows \[0, 1\]"):
        texts.prefixes.check_integrity()


class PrefixMachine(RuleBasedStateMachine):
    """Texts of a few words, so that they begin alike, in random operations over a small pool."""

    @initialize(
        num_blocks=st.integers(4, 40),
        windows=st.sampled_from([(None,), (None, 6), (5,), (None, 3, 9)]),
        same_hash=st.booleans(),
        max_cached=st.sampled_from([None, None, 3]),
    )
    def make(self, num_blocks, windows, same_hash, max_cached):
        self.texts = Texts(num_blocks, windows, (lambda data: data[:1]) if same_hash else sha256)
        self.texts.pool.max_cached = max_cached
        self.pins = set()

    def some(self, data):
        return data.draw(st.sampled_from(list(self.texts.texts)))

    tokens = st.lists(st.sampled_from([[1], [1, 2], [3] * 4, [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9]]), max_size=4).map(
        lambda words: [token for word in words for token in word]
    )

    @precondition(lambda self: len(self.texts.texts) < 5)
    @rule(tokens=tokens, salt=st.sampled_from("ab"), publish=st.booleans())
    def start(self, tokens, salt, publish):
        with contextlib.suppress(OutOfBlocksError):
            self.texts.start(tokens, salt, publish)

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data(), tokens=tokens, publish=st.booleans())
    def append(self, data, tokens, publish):
        with contextlib.suppress(OutOfBlocksError):
            self.texts.append(self.some(data), tokens, publish)

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data())
    def publish(self, data):
        self.texts.prefixes.publish(self.some(data))

    @precondition(lambda self: 0 < len(self.texts.texts) < 5)
    @rule(data=st.data())
    def fork(self, data):
        self.texts.fork(self.some(data))

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data())
    def trim(self, data):
        sequence = self.some(data)
        with contextlib.suppress(WindowPassedError):
            self.texts.trim(sequence, data.draw(st.integers(0, sequence.length)))

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data())
    def free(self, data):
        self.texts.free(self.some(data))

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data())
    def overwrite(self, data):
        """Blocks that nobody shares change: what lies in them is no text that anybody may find."""
        sequence = self.some(data)
        blocks = [(group, block) for group, table in enumerate(sequence.tables) for block in table.blocks]
        if all(self.texts.pool.refcount(block) == 1 for _, block in blocks):
            self.texts.prefixes.withdraw(block for _, block in blocks)
            for group, block in blocks:
                for offset in range(SIZE):
                    self.texts.slots[group, block * SIZE + offset] = None
            self.texts.free(sequence)

    @rule(tokens=tokens, salt=st.sampled_from("ab"))
    def pin(self, tokens, salt):
        length = self.texts.prefixes.pin(self.texts.root(salt), array("q", tokens))
        assert length <= len(tokens)
        key = (salt, tuple(tokens))
        self.pins = self.pins | {key} if length else self.pins - {key}

    @rule(tokens=tokens, salt=st.sampled_from("ab"))
    def unpin(self, tokens, salt):
        key = (salt, tuple(tokens))
        assert self.texts.prefixes.unpin(self.texts.root(salt), array("q", tokens)) == (key in self.pins)
        self.pins.discard(key)

    @rule(count=st.integers(1, 40))
    def evict(self, count):
        """Somebody else needs blocks for a moment."""
        pool = self.texts.pool
        before, untouched = pool.num_cached, pool.num_free - pool.num_cached
        if count <= pool.num_free:
            taken = pool.allocate(count)
            assert before - pool.num_cached == max(count - untouched, 0)
            for group in range(len(self.texts.windows)):
                for block in taken:
                    for offset in range(SIZE):
                        self.texts.slots[group, block * SIZE + offset] = None
            for block in taken:
                pool.release(block)

    @rule()
    def drop(self):
        assert self.texts.pool.drop_cached() >= 0
        assert self.texts.pool.num_cached == 0

    @invariant()
    def all_is_right(self):
        if not hasattr(self, "texts"):
            return
        self.texts.check()
        index, pool = self.texts.prefixes.index, self.texts.pool
        assert index.num_blocks <= pool.num_blocks
        for block, (entry, group) in index._holder.items():
            assert entry.blocks[group] == block != GONE
            items, keys, above = entry.items[:], entry.root.keys, entry.parent
            while above is not entry.root:
                items, above = above.items + items, above.parent
            for offset in range(SIZE):
                expected = (keys, tuple(items[: len(items) - SIZE + offset + 1]))
                assert self.texts.slots[group, block * SIZE + offset] == expected, "a published block is not its text"

    def teardown(self):
        if hasattr(self, "texts"):
            self.texts.free_all()
            for salt, tokens in self.pins:
                self.texts.prefixes.unpin(self.texts.root(salt), array("q", tokens))
            assert self.texts.pool.num_used == 0
            self.texts.check()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
