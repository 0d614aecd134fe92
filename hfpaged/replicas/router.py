"""The request router of Ray Serve that sends requests to replicas that know how they begin."""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from hfpaged.replicas.affinity import Thresholds
from hfpaged.replicas.recent_prefixes import MEMORY_SECONDS
from hfpaged.replicas.routing import Routing
from hfpaged.replicas.routing_hash import hashes_in

PREFIX_HASHES = "prefix_hashes"  # the argument of a replica's call that this reads


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Calls with `prefix_hashes` (see RoutingHash.chain) go where the longest prefix is known; others as Ray Serve
    sends them by default, to the less loaded of two. What it knows: the stats that replicas record, the requests that
    they have, and what it has itself sent there. Each ingress has one of its own.
    """

    # A replica that does not tell its queue in that time is passed over, and what it knows is computed again: it may
    # only be busy, where Ray Serve's 0.1 s are for replicas of which one is as good as another.
    queue_len_response_deadline_s = 0.5

    def initialize_state(self, *, memory_seconds: float = MEMORY_SECONDS, **thresholds: Any) -> None:
        """With `request_router_kwargs`: the fields of Thresholds. Raises InvalidConfigError."""
        self._routing = Routing(Thresholds(**thresholds), memory_seconds=memory_seconds, clock=time.monotonic)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one each, for within a rank Ray Serve takes the shortest queue."""
        hashes = _hashes_of(pending_request)
        if pending_request is None or hashes is None:
            return self._any_two(pending_request)
        # Where all of them refuse, it is tried again after a while.
        pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        told = {name: each.routing_stats for name, each in replicas.items()}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) for name, each in replicas.items()}
        return [[replicas[name]] for name in self._routing.choose(hashes, told, loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See RequestRouter."""
        if (hashes := _hashes_of(pending_request)) is not None:
            self._routing.sent(hashes, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See RequestRouter."""
        super().on_replica_actor_died(replica_id)
        self._keep_current()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See RequestRouter."""
        super().update_replicas(replicas)
        self._keep_current()

    def _keep_current(self) -> None:
        self._routing.keep({replica_id.unique_id for replica_id in self.curr_replicas})

    def _any_two(self, pending_request: PendingRequest | None) -> list[list[RunningReplica]]:
        """One rank of two: of these Ray Serve takes the one with the shorter queue."""
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending_request=pending_request)
        else:
            ids = self.apply_locality_routing(pending_request=pending_request)
        chosen = random.sample(list(ids), min(2, len(ids)))
        return [[self.curr_replicas[each] for each in chosen if each in self.curr_replicas]]


def _hashes_of(pending_request: PendingRequest | None) -> bytes | None:
    return None if pending_request is None else hashes_in(pending_request.kwargs.get(PREFIX_HASHES))
