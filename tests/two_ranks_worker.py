"""Cases that end in every way, for the tests of two_ranks.py."""

import os
import sys
import time

import torch
import torch.distributed as dist
import two_ranks

dist.init_process_group("gloo")
RANK = dist.get_rank()


def add():
    total = torch.tensor([RANK + 1])
    dist.all_reduce(total)
    return {"sum": total, "rank": RANK, "said": sys.argv[1:], "threads": torch.get_num_threads()}


def wrong_on_rank_1():
    add()
    assert RANK != 1, "what rank 1 says"


def alone_in_an_exchange():
    if RANK == 0:
        raise ValueError("what rank 0 says")
    add()


def never():
    raise AssertionError("nobody comes here")


if os.environ.get("HANGS"):
    if RANK == 0:
        add()  # rank 1 never comes
    while True:
        time.sleep(0.1)

CASES = (add, wrong_on_rank_1, add, alone_in_an_exchange, never)
two_ranks.report({f"{number} {case.__name__}": case for number, case in enumerate(CASES)})
