"""Whose blocks are taken back when they run out.

Every policy must leave one group alone for good, so that somebody always comes to his end: here it is the one of the
best priority that has had the most work, which grows with each preemption and is never forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from hfpaged.engine.request import SequenceGroup

# Given the running groups, all of the lowest priority: the one to preempt.
PreemptionPolicy = Callable[[Many[SequenceGroup]], SequenceGroup]


def least_computed_first(groups: Many[SequenceGroup]) -> SequenceGroup:
    """The one with the fewest tokens computed so far; of equals the one that came last."""
    return min(groups, key=lambda group: (group.work, -group.request.number, -group.sequences[0].index))


def last_come_first_out(groups: Many[SequenceGroup]) -> SequenceGroup:
    """The one that came last, as many engines do: it is likely to be preempted again and again."""
    return max(groups, key=lambda group: (group.request.number, group.sequences[0].index))


POLICIES: dict[str, PreemptionPolicy] = {
    "least_computed": least_computed_first,
    "last_come": last_come_first_out,
}
