"""How many replicas a load needs."""

from types import SimpleNamespace

import pytest

from hfpaged.replicas.load import Load
from hfpaged.replicas.scaling import ReplicaLoad, loads_of, policy, replicas_wanted


def load(running=0, waiting=0, kv_use=0.0, max_num_seqs=10):
    return ReplicaLoad(running, waiting, kv_use, max_num_seqs)


# Loads of the replicas that are there, their target number, the fewest and the most, and how many are wanted.
CASES = {
    "nobody has told anything": ([], 2, 1, 4, 2),
    "nobody has told anything, and the bounds have moved": ([], 2, 3, 4, 3),
    "idle": ([load(), load()], 2, 1, 4, 1),
    "idle, and two are the fewest": ([load(), load()], 2, 2, 4, 2),
    "half full": ([load(running=5)], 1, 1, 4, 1),
    "just full enough": ([load(running=8)], 1, 1, 4, 1),
    "fuller than that": ([load(running=9)], 1, 1, 4, 2),
    "a queue as long as what runs": ([load(running=10, waiting=10)], 1, 1, 8, 3),
    "a queue, and no more may be started": ([load(running=10, waiting=90)], 1, 1, 4, 4),
    "a full pool": ([load(running=2, kv_use=1.0)], 1, 1, 4, 2),
    "a full pool of few long texts, and others wait for it": ([load(running=2, waiting=2, kv_use=1.0)], 1, 1, 4, 3),
    "all wait, for a prefix say": ([load(waiting=5)], 1, 1, 4, 1),
    "one is full and one is idle": ([load(running=10), load()], 2, 1, 4, 2),
    "what two had fits into one": ([load(running=4), load(running=4)], 2, 1, 4, 1),
    "more has been asked for and starts": ([load(running=10)], 3, 1, 4, 3),
    "more has been asked for, and still more is wanted": ([load(running=10, waiting=30)], 3, 1, 8, 5),
}


@pytest.mark.parametrize(("loads", "target", "least", "most", "wanted"), CASES.values(), ids=CASES)
def test_as_many_are_wanted_as_keep_queue_and_pool_below_the_target(loads, target, least, most, wanted):
    assert replicas_wanted(loads, target, least, most) == wanted


def test_a_replica_records_what_the_policy_reads():
    assert Load._fields == ReplicaLoad._fields


def gathered(**columns):
    return {name: {"a": value} for name, value in columns.items()}


def test_a_replica_that_has_not_told_all_of_it_is_left_out():
    told = gathered(running=9.0, waiting=1.0, kv_use=0.5, max_num_seqs=10.0)
    assert loads_of(told) == [ReplicaLoad(9.0, 1.0, 0.5, 10.0)]
    told["running"]["b"] = 3.0
    assert loads_of(told) == [ReplicaLoad(9.0, 1.0, 0.5, 10.0)]
    assert loads_of({}) == loads_of(None) == []


def test_the_policy_reads_the_context_of_ray_serve():
    context = SimpleNamespace(
        aggregated_metrics=gathered(running=10.0, waiting=10.0, kv_use=0.5, max_num_seqs=10.0),
        target_num_replicas=1, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8,
    )  # fmt: skip
    assert policy(context) == (3, {})
