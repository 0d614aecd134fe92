"""From the rank that leads to those that follow: one small tensor for each step."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hfpaged.ranks import Ranks

Ints = npt.NDArray[np.int64]

# Whoever follows waits for the next step as long as nobody asks for anything: no time is too long. That a rank is gone
# is found out by `RankWatch`.
FOR_EVER = timedelta(days=365)
FEWEST, MOST = 2**10, 2**15  # numbers in the one tensor: 8 KiB at first, and 256 KiB at most


def new_group(ranks: Ranks) -> dist.ProcessGroup:
    """A gloo group of its own for these ranks, where waiting never takes too long. All ranks must call it."""
    members, apart = dist.get_process_group_ranks(ranks.group), not _are_all(ranks)
    group: dist.ProcessGroup = dist.new_group(members, FOR_EVER, "gloo", use_local_synchronization=apart)
    return group


def end_group(ranks: Ranks, group: dist.ProcessGroup) -> None:
    """All ranks are done with it. One of some of the processes stays: the next one of the same processes would get its
    name, and find its addresses.
    """
    if _are_all(ranks):
        with suppress(RuntimeError, ValueError):  # the process group of torch may have ended before
            dist.destroy_process_group(group)


def _are_all(ranks: Ranks) -> bool:
    return ranks.size == dist.get_world_size()


class PlanChannel:
    """Messages of a kind and int64 numbers. All go through one broadcast of a tensor that has room for most of them:

        kind  length  numbers ............ (what an earlier message left)

    A longer one is told in a second broadcast, behind what the first one has of it, and from then on the tensor has
    room for such, up to `MOST`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._group = ranks, new_group(ranks)
        self._tensor = torch.zeros(FEWEST, dtype=torch.int64)
        self._numbers: Ints = self._tensor.numpy()
        self.num_sent = self.num_numbers = 0

    def send(self, kind: int, numbers: Ints) -> None:
        """From rank 0. Raises RuntimeError where a rank is gone."""
        first = len(self._numbers) - 2
        self._numbers[:2] = kind, len(numbers)
        self._numbers[2 : 2 + len(numbers)] = numbers[:first]
        self._broadcast(self._tensor)
        if len(numbers) > first:
            self._broadcast(torch.from_numpy(numbers[first:]))
            self._make_room(len(numbers))
        self.num_sent += 1
        self.num_numbers += 2 + len(numbers)

    def receive(self) -> tuple[int, Ints]:
        """On all other ranks: the next message, whenever it comes. Raises RuntimeError where a rank is gone."""
        self._broadcast(self._tensor)
        kind, length = self._numbers[:2].tolist()
        first = len(self._numbers) - 2
        numbers = self._numbers[2 : 2 + length].copy()
        if length > first:
            rest = torch.empty(length - first, dtype=torch.int64)
            self._broadcast(rest)
            numbers = np.concatenate([numbers, rest.numpy()])
            self._make_room(length)
        return kind, numbers

    def close(self) -> None:
        """All ranks have had the last message."""
        end_group(self._ranks, self._group)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group=self._group, group_src=0)

    def _make_room(self, length: int) -> None:
        """On all ranks alike."""
        size = min(1 << (length + 1).bit_length(), MOST)
        if size > len(self._numbers):
            self._tensor = torch.zeros(size, dtype=torch.int64)
            self._numbers = self._tensor.numpy()
