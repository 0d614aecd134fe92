"""What a replica publishes of its prefixes is what a request's hashes, made without a model, are looked up in."""

from __future__ import annotations

from array import array

import pytest

from hfpaged.block_hash import ExtraKey
from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.prefix_cache import PrefixCache
from hfpaged.replicas import published as published_module
from hfpaged.replicas.published import PublishedPrefixes
from hfpaged.replicas.routing_hash import SIZE, RoutingHash, as_numbers, hashes_in, keys_for
from hfpaged.token_chain import TokenChain

BLOCK = 4
HASH = RoutingHash(b"of the cluster")
MODEL = ExtraKey("model", "a fingerprint that no ingress knows")


class Pool:
    """Real blocks and a real prefix index, without tensors."""

    def __init__(self, num_blocks=64, windows=(None,), routing_hash=HASH):
        self.blocks = BlockPool(num_blocks)
        self.manager = BlockManager(self.blocks, len(windows), BLOCK)
        self.prefixes = PrefixCache(self.manager, list(windows))
        self.published = PublishedPrefixes(routing_hash, windows)
        self.prefixes.index.watchers.append(self.published)

    def publish(self, tokens, salt=None, adapter=None, more=(), width=1):
        root = self.prefixes.index.root([MODEL, *keys_for(salt, adapter), *more], width)
        sequence = self.manager.create()
        self.manager.grow([(sequence, len(tokens) // width)])
        sequence.chain = TokenChain(root, array("q", tokens), [])
        self.prefixes.publish(sequence)
        self.manager.free(sequence)

    @property
    def told(self):
        return set(as_numbers(self.published.hottest()))


def hashes(tokens, salt=None, adapter=None, routing_hash=HASH):
    """Of the full blocks of a prompt that ends behind them."""
    return list(as_numbers(routing_hash.chain(keys_for(salt, adapter), [*tokens, 0], BLOCK)))


def test_a_request_finds_what_was_published_by_hashes_made_without_a_model():
    pool = Pool()
    pool.publish(range(10))
    assert pool.told == set(hashes(range(8)))
    assert set(hashes([*range(4), 9, 9, 9, 9])) & pool.told == {hashes(range(4))[0]}
    assert not set(hashes(range(1, 9))) & pool.told


def test_the_last_token_of_a_prompt_is_no_part_of_what_may_be_known():
    assert len(HASH.chain([], range(8), BLOCK)) == SIZE
    assert len(HASH.chain([], range(9), BLOCK)) == 2 * SIZE
    assert HASH.chain([], [], BLOCK) == b""


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({"salt": "a"}, {"salt": "b"}), ({"salt": "a"}, {}), ({"adapter": "a"}, {}), ({"salt": "a"}, {"adapter": "a"})],
)
def test_one_tenants_prompt_never_matches_anothers(mine, theirs):
    pool = Pool()
    pool.publish(range(8), **mine)
    assert set(hashes(range(8), **mine)) == pool.told
    assert not set(hashes(range(8), **theirs)) & pool.told


def test_who_has_not_the_secret_cannot_try_prompts_out():
    pool = Pool()
    pool.publish(range(8))
    assert not set(hashes(range(8), routing_hash=RoutingHash(b"guessed"))) & pool.told
    with pytest.raises(ValueError, match="secret"):
        RoutingHash(b"")


def test_evicted_blocks_are_told_no_more_and_come_back_when_they_are_computed_again():
    pool = Pool(num_blocks=4)
    pool.publish(range(8))
    pool.publish(range(100, 116))  # takes all four
    assert pool.told == set(hashes(range(100, 116)))
    pool.publish(range(8))
    assert set(hashes(range(8))) <= pool.told
    pool.blocks.drop_cached()
    assert pool.told == set()
    assert len(pool.published) == 0


def test_what_is_no_plain_prompt_is_not_told():
    pool = Pool()
    pool.publish(range(8), more=[ExtraKey("input:pixel_values", "x")])
    pool.publish(range(16), width=2)
    assert pool.told == set()


def test_a_block_counts_when_it_is_there_in_full_attention_whatever_has_left_a_window():
    pool = Pool(windows=(None, 4), num_blocks=8)
    pool.publish(range(8))
    entry = next(iter(pool.prefixes.index.roots[0].children.values()))
    pool.blocks.evict(entry.blocks[1])
    assert pool.told == set(hashes(range(8)))
    pool.blocks.evict(entry.blocks[0])
    assert hashes(range(8))[0] not in pool.told


def test_two_roots_of_one_salt_are_told_as_one_and_the_older_ones_end_takes_nothing_from_the_newer():
    pool = Pool()
    pool.publish(range(4), more=[ExtraKey("hooks", "old")])
    pool.publish(range(4), more=[ExtraKey("hooks", "new")])
    old, new = sorted((root for root in pool.prefixes.index.roots), key=lambda root: root.last_use)
    pool.blocks.evict(next(iter(old.children.values())).blocks[0])
    assert pool.told == set(hashes(range(4)))
    pool.blocks.evict(next(iter(new.children.values())).blocks[0])
    assert pool.told == set()


def test_of_many_blocks_those_are_told_where_chains_part_or_end_and_at_powers_of_two():
    pool = Pool()
    trunk = list(range(4 * 7))
    pool.publish([*trunk, *range(200, 212)])  # ends at depth 10
    pool.publish([*trunk, *range(300, 312)])
    told = as_numbers(pool.published.hottest(limit=12))[:8]
    first, second = hashes([*trunk, *range(200, 212)]), hashes([*trunk, *range(300, 312)])
    assert set(told) == {first[depth - 1] for depth in (1, 2, 4, 7, 8, 10)} | {second[7], second[9]}
    assert len(pool.told) == 13


def test_where_the_end_of_a_chain_is_evicted_the_block_before_it_is_told():
    pool = Pool()
    pool.publish(range(4 * 7))
    pool.publish(range(100, 108))
    made = hashes(range(4 * 7))
    assert made[5] not in as_numbers(pool.published.hottest(limit=6))
    entry = next(iter(pool.prefixes.index.roots[-1].children.values()))
    while entry.children:
        entry = next(iter(entry.children.values()))
    pool.blocks.evict(entry.blocks[0])
    told = list(as_numbers(pool.published.hottest(limit=6)))
    assert told == [*hashes(range(100, 108))[::-1], *(made[depth - 1] for depth in (6, 4, 2, 1))]


def test_of_many_prefixes_the_last_used_ones_are_told():
    pool = Pool()
    for start in range(0, 100, 10):
        pool.publish(range(start, start + 8))
    pool.publish([*range(8), *range(500, 504)])  # the oldest one is gone on from
    told = list(as_numbers(pool.published.hottest(limit=5)))
    assert told[:2] == hashes([*range(8), *range(500, 504)])[:0:-1]
    assert told[2:4] == hashes(range(90, 98))[::-1]
    assert len(told) == 5


def test_the_order_in_which_hashes_were_made_is_forgotten_but_no_block_that_is_there(monkeypatch):
    monkeypatch.setattr(published_module, "REMEMBERED", 4)
    pool = Pool(num_blocks=8)
    for start in range(0, 4000, 100):
        pool.publish(range(start, start + 12))
    assert len(pool.published._known) <= 2 * 8 + 4 + 1
    pool.publish([*range(3900, 3912), *range(7000, 7012)])
    assert set(hashes([*range(3900, 3912), *range(7000, 7012)])) <= pool.told


def test_a_chain_is_hashed_once_however_long_it_gets():
    calls = []

    class Counting(RoutingHash):
        def block(self, parent, tokens):
            calls.append(1)
            return super().block(parent, tokens)

    pool = Pool(routing_hash=Counting(b"x"))
    for length in range(4, 164, 4):
        pool.publish(range(length))
    assert len(calls) == 40


def test_hashes_from_elsewhere_are_whole_or_none():
    assert hashes_in(b"12345678") == b"12345678"
    for wrong in (None, b"", b"123", "12345678", [1], 7):
        assert hashes_in(wrong) is None
