"""How many replicas a load needs. Ray Serve takes this module by value into its controller: it imports nothing of ours,
so that no model library is loaded there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Of a replica's sequences and of its pool, so much is in use where there are as many replicas as wanted: the rest is
# for what comes until another one has loaded its model.
TARGET = 0.8
LOOK_BACK_SECONDS = 15.0  # loads are averages of this time
UP_SECONDS = 15.0  # that more are wanted before there are more
DOWN_SECONDS = 300.0  # that fewer are wanted: a replica that goes takes its prefixes with it
EPSILON = 1e-9  # that sums of shares may be off


class ReplicaLoad(NamedTuple):
    """As `hfpaged.replicas.load.Load`, averaged."""

    running: float
    waiting: float
    kv_use: float
    max_num_seqs: float

    @property
    def demand(self) -> float:
        """What its requests would fill if none of them waited, in replicas: of sequences or of the pool, whichever is
        more. Those that wait will need as much of the pool as those that run.
        """
        requests = self.running + self.waiting
        waits = requests / self.running if self.running >= 1 else 1.0
        return max(requests / max(self.max_num_seqs, 1.0), self.kv_use * waits)


def replicas_wanted(loads: Sequence[ReplicaLoad], target: int, least: int, most: int) -> int:
    """Between `least` and `most`; the present `target` while no replica has told its load."""
    if not loads:
        return min(max(target, least), most)
    silent = max(target - len(loads), 0)  # they start, or go: as loaded as the others will be
    demand = sum(load.demand for load in loads)
    wanted = math.ceil(demand / TARGET - EPSILON)
    if silent and wanted < target:
        wanted = target
    return min(max(wanted, least), most)


def loads_of(metrics: Mapping[str, Mapping[Any, float]] | None) -> list[ReplicaLoad]:
    """Of the replicas that have told all of it, by what Ray Serve has gathered: values by replica, by name."""
    columns = [dict((metrics or {}).get(name) or {}) for name in ReplicaLoad._fields]
    replicas = [replica for replica in columns[0] if all(replica in column for column in columns)]
    return [ReplicaLoad(*(float(column[replica]) for column in columns)) for replica in replicas]


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Of Ray Serve's AutoscalingContext. Delays are Ray Serve's own."""
    wanted = replicas_wanted(
        loads_of(context.aggregated_metrics), context.target_num_replicas,
        context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas,
    )  # fmt: skip
    return wanted, {}
