"""The processes that compute one model together, each a part of it, and what they must agree about.

All of them run the same program on the same tokens, and exchange partial sums within each layer: a rank that decided
otherwise than the others would leave them waiting. What a rank finds out by itself (free memory, known prefixes) is
therefore compared before it decides anything. Every function here is one for all ranks: each must call it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hfpaged.errors import RankLostError, RanksDifferError

logger = logging.getLogger("hfpaged")
PATIENCE = 10.0  # seconds for which a rank waits for the others without a word
_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Ranks:
    """This process is number `rank` of `size`; `group` is torch's own for the exchange of partial sums."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def on_host(self) -> int:
        """How many of them share the memory of this machine, as torchrun says."""
        return min(self.size, max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    @property
    def host_group(self) -> dist.ProcessGroup:
        """A gloo group for small tensors in host memory, made by all ranks: NCCL knows none, and where ranks do
        different things what is compared must not meet the sums of a layer, which gloo would take for it.
        """
        if self.group not in _host_groups:
            members = dist.get_process_group_ranks(self.group)
            with _told_if_long(self):
                _host_groups[self.group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return _host_groups[self.group]


def path_of_rank(path: str | os.PathLike[str], ranks: Ranks | None) -> str:
    """The file of this rank where all are told one: "a/prefixes.safetensors" is "a/prefixes.rank0-of-2.safetensors"."""
    if ranks is None:
        return os.fspath(path)
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.rank{ranks.rank}-of-{ranks.size}{whole.suffix}"))


def smallest(ranks: Ranks | None, number: int) -> int:
    """Of what all ranks give; `number` itself where there is one process only."""
    return ranges(ranks, [number])[0][0]


def ranges(ranks: Ranks | None, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(the smallest, the largest) over the ranks of each of these numbers, of which every rank gives equally many.
    Raises RankLostError.
    """
    if ranks is None:
        return [(number, number) for number in numbers]
    both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64)
    try:
        _wait(ranks, dist.all_reduce(both, op=dist.ReduceOp.MIN, group=ranks.host_group, async_op=True))
    except RuntimeError as error:
        why = str(error).strip().splitlines()[-1]
        raise RankLostError(f"another rank is gone, as {ranks} noticed while it waited for it ({why})") from error
    low, high = both.view(2, -1).tolist()
    return [(least, -most) for least, most in zip(low, high, strict=True)]


def broadcast(ranks: Ranks, tensor: Tensor) -> None:
    """Fill `tensor`, of any shape and in host memory, with what it is on rank 0."""
    dist.broadcast(tensor, group=ranks.host_group, group_src=0)


def digest(*parts: bytes) -> int:
    """A number of 62 bits that stands for these bytes."""
    known = hashlib.sha256()
    for part in parts:
        known.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(known.digest()[:8], "little") >> 2


def check_same(ranks: Ranks | None, what: str, number: int, remedy: str) -> None:
    """Raises RanksDifferError, on all ranks, unless all give the same number."""
    if ranks is None:
        return
    ((low, high),) = ranges(ranks, [number])
    if low != high:
        given = [torch.empty(1, dtype=torch.int64) for _ in range(ranks.size)]
        dist.all_gather(given, torch.tensor([number], dtype=torch.int64), group=ranks.host_group)
        raise RanksDifferError(what, [int(each) for each in given], ranks.rank, remedy)


def _wait(ranks: Ranks, work: dist.Work) -> None:
    """Until all ranks have brought their part. Raises RuntimeError where one is gone."""
    try:
        work.wait(timedelta(seconds=PATIENCE))
    except RuntimeError:
        if work.is_completed():  # and so it has failed
            raise
        _tell_of_waiting(ranks)
        work.wait()


@contextmanager
def _told_if_long(ranks: Ranks) -> Iterator[None]:
    """The same, around what can only wait as a whole."""
    timer = threading.Timer(PATIENCE, _tell_of_waiting, [ranks])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell_of_waiting(ranks: Ranks) -> None:
    logger.warning(
        "%s has waited for another rank for %.0f s: all ranks must make the same calls, generate() of this model with "
        "a PagedCache on each of them, or none", ranks, PATIENCE,
    )  # fmt: skip
