"""One prompt becomes many sequences, when it is computed."""

from __future__ import annotations

from collections.abc import Callable

from hfpaged.block_manager import BlockManager
from hfpaged.engine.request import SequenceGroup, SequenceState
from hfpaged.engine.scheduler import Scheduler


def fork_samples(
    group: SequenceGroup,
    manager: BlockManager,
    scheduler: Scheduler,
    equip: Callable[[SequenceState], SequenceState],
) -> list[SequenceState]:
    """The group of one sequence whose prompt is computed becomes as many groups as it has seats, on the same blocks;
    each fork is one that `equip` gives back. Returns all sequences of the request. Call it under the lock of the pool.
    """
    request, (first,) = group.request, group.sequences
    for index in range(1, group.seats):
        child = equip(first.fork(index))
        assert first.blocks is not None
        child.blocks = manager.fork(first.blocks)
        request.sequences.append(child)
    others = [SequenceGroup(request, [seq]) for seq in request.sequences[1:]]
    group.seats = 1
    request.groups += others
    scheduler.replace(group, [group, *others])
    return list(request.sequences)
