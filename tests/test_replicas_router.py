"""The router as Ray Serve calls it, on replicas that are none."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array

import pytest

pytest.importorskip("ray.serve")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from hfpaged.errors import InvalidConfigError
from hfpaged.replicas.router import PrefixRouter

NUMBERS = itertools.count()
DEPLOYMENT = DeploymentID("Replica", "hfpaged")
WHO = {"deployment_id": DEPLOYMENT, "handle_source": DeploymentHandleSource.REPLICA}


class FakeReplica:
    node_id, availability_zone, multiplexed_model_ids, is_cross_language = "node", None, frozenset(), False

    def __init__(self, name, queue=0, **stats):
        self.replica_id, self.routing_stats = ReplicaID(name, DEPLOYMENT), stats
        self.queue, self.max_ongoing_requests = queue, 10

    async def get_queue_len(self, *, deadline_s):
        return self.queue


def hashes(*numbers):
    return array("Q", numbers).tobytes()


def request(prefix_hashes=None):
    metadata = RequestMetadata(request_id="r", internal_request_id=f"i{next(NUMBERS)}")
    kwargs = {} if prefix_hashes is None else {"prefix_hashes": prefix_hashes}
    return PendingRequest(args=[], kwargs=kwargs, metadata=metadata)


def with_router(work, *replicas, **state):
    async def run():
        router = PrefixRouter(**WHO, use_replica_queue_len_cache=True)
        router.initialize_state(**state)
        router.update_replicas(list(replicas))
        for _ in range(3):
            await asyncio.sleep(0)
        return await asyncio.wait_for(work(router), 30)

    return asyncio.run(run())


async def sent_to(router, *given):
    replica = await router._choose_replica_for_request(request(*given))
    router.on_send_request(replica.replica_id)
    return replica.replica_id.unique_id


def test_a_call_goes_where_its_prefix_is_known_and_the_next_best_gets_it_where_that_one_takes_none():
    a, b, c = FakeReplica("a"), FakeReplica("b", prefixes=hashes(1, 2)), FakeReplica("c", prefixes=hashes(1))

    async def work(router):
        first = [await sent_to(router, hashes(1, 2, 3)) for _ in range(3)]
        b.queue = 10  # as many as it may have
        router.on_new_queue_len_info(b.replica_id, 10)
        return first, await sent_to(router, hashes(1, 2, 4))

    assert with_router(work, a, b, c) == (["b"] * 3, "c")


def test_a_burst_follows_its_first_call():
    async def work(router):
        return await asyncio.gather(*(sent_to(router, hashes(1, 2, 3, 10 + n)) for n in range(6)))

    assert len(set(with_router(work, *(FakeReplica(name) for name in "abcd")))) == 1


@pytest.mark.parametrize("given", [None, b"", b"123", "text", [1, 2]])
def test_without_hashes_the_less_loaded_of_two_gets_the_call(given):
    async def work(router):
        return [await sent_to(router, *(() if given is None else (given,))) for _ in range(20)]

    found = with_router(work, FakeReplica("a", prefixes=hashes(1)), FakeReplica("b"))
    assert found.count("a") == found.count("b") == 10


def test_stats_that_are_nonsense_route_all_the_same():
    broken = FakeReplica("a", prefixes=b"123", free="much", running=None)
    broken.routing_stats = ["no", "mapping"]

    async def work(router):
        return [await sent_to(router, hashes(1, 2)) for _ in range(3)]

    assert with_router(work, broken, FakeReplica("b", prefixes=hashes(1, 2))) == ["b"] * 3
    assert with_router(work, broken) == ["a"] * 3


def test_a_replica_that_dies_is_forgotten_and_another_gets_its_prefixes():
    async def work(router):
        first = await sent_to(router, hashes(1, 2))
        gone = next(each for each in router.curr_replicas if each.unique_id == first)
        router.on_replica_actor_died(gone)
        assert router._routing._recent.placed(first, time.monotonic()) == 0
        return first, await sent_to(router, hashes(1, 2))

    first, second = with_router(work, FakeReplica("a"), FakeReplica("b"))
    assert {first, second} == {"a", "b"}


def test_the_one_that_got_a_call_in_the_end_is_remembered():
    a, b = FakeReplica("a"), FakeReplica("b")

    async def work(router):
        first = await sent_to(router, hashes(1, 2))
        other = b if first == "a" else a
        router.on_request_routed(request(hashes(7, 8)), other.replica_id, None)
        return first, other.replica_id.unique_id, await sent_to(router, hashes(7, 8, 9))

    first, other, found = with_router(work, a, b)
    assert (found, first) == (other, "b" if other == "a" else "a")


def test_the_configuration_of_ray_serve_takes_the_router_by_its_path_with_its_thresholds():
    config = RequestRouterConfig(
        request_router_class="hfpaged.replicas.router.PrefixRouter", request_router_kwargs={"gain": 0.2, "slack": 4}
    )
    assert config.get_request_router_class() is PrefixRouter
    with pytest.raises(InvalidConfigError, match="ratio"):
        PrefixRouter(**WHO).initialize_state(ratio=0.5)


def test_a_replica_that_tells_its_queue_late_gets_what_it_knows_all_the_same():
    class Late(FakeReplica):
        async def get_queue_len(self, *, deadline_s):
            await asyncio.sleep(0.25)  # more than Ray Serve waits by default
            return self.queue

    known = Late("a", prefixes=hashes(1, 2))
    assert with_router(lambda router: sent_to(router, hashes(1, 2)), known, FakeReplica("b")) == "a"
