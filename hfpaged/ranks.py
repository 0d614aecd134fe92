"""The processes that compute one model together, each a part of it, and what they must agree about.

All of them run the same program on the same tokens, and exchange partial sums within each layer: a rank that decided
otherwise than the others would leave them waiting. What a rank finds out by itself (free memory, known prefixes) is
therefore compared before it decides anything. Every function here is one for all ranks: each must call it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hfpaged.errors import RankLostError, RanksDifferError

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
        """For small tensors in host memory: NCCL knows none, so a gloo group is made beside it, by all ranks."""
        if dist.get_backend(self.group) == "gloo":
            return self.group
        if self.group not in _host_groups:
            members = dist.get_process_group_ranks(self.group)
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
        dist.all_reduce(both, op=dist.ReduceOp.MIN, group=ranks.host_group)
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
