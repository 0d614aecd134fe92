"""What routing by prefix is for: the hit rate of one replica with a pool of the same total size."""

from __future__ import annotations

import pytest
from replica_traffic import Traffic, hit_rates

from hfpaged.replicas.routing_hash import as_numbers

pytestmark = pytest.mark.usefixtures("one_thread")

# Eight system prompts of 24 blocks are 192; a pool of 288 has them all, its half does not.
BLOCKS = 288


@pytest.mark.parametrize(("seed", "ingresses"), [(0, 1), (3, 2)])
def test_eight_system_prompts_hit_as_on_one_replica_and_much_more_than_in_turn(seed, ingresses):
    one, near, turn = hit_rates(Traffic(seed=seed), BLOCKS, ingresses=ingresses)
    assert one.hit_rate > 0.75
    assert near.hit_rate >= 0.9 * one.hit_rate
    assert near.hit_rate >= 1.5 * turn.hit_rate
    assert min(near.sent.values()) > 160 / 4
    assert near.step < 1.05 * turn.step  # nobody waits longer for it


def test_some_prompts_that_are_asked_for_more_than_others_do_not_draw_all_to_one_replica():
    one, near, turn = hit_rates(Traffic(skew=1.0), BLOCKS)
    assert one.hit_rate > 0.75
    assert near.hit_rate >= 0.9 * one.hit_rate
    assert near.hit_rate >= 1.2 * turn.hit_rate
    assert min(near.sent.values()) > 160 / 4


def test_more_prompts_than_all_pools_hold_hit_no_less_than_on_one_replica():
    one, near, turn = hit_rates(Traffic(prompts=24), BLOCKS)
    assert 0.2 < one.hit_rate < 0.5
    assert near.hit_rate >= 0.9 * one.hit_rate
    assert near.hit_rate >= 1.5 * turn.hit_rate


def test_what_replicas_publish_is_what_their_pools_have():
    _, near, _ = hit_rates(Traffic(requests=40), BLOCKS)
    for name, batcher in near.batchers.items():
        index = batcher.pool.prefixes.index
        told = set(as_numbers(near.reporters[name].stats()["prefixes"]))
        assert len(told) == index.num_blocks > 0
        batcher.pool.drop_prefixes()
        assert near.reporters[name].stats()["prefixes"] == b""
