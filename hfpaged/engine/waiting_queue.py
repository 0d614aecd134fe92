"""Who is next: by priority, preempted before new, then a fair share for each tenant, then order of arrival.

The share is counted in tokens as in the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large
Language Models" (arXiv 2401.00588): of the tenants that wait, the one that has had the fewest is served.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from hfpaged.engine.request import SequenceGroup

Rank = tuple[int, int, int, int]
Entry = tuple[Rank, SequenceGroup]  # no two of the same rank: groups are never compared


class WaitingQueue:
    """Groups that hold no block. Without `by_priority` all have the same priority."""

    def __init__(self, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._waiting: dict[str, list[Entry]] = {}  # by tenant, each in order; none that is empty
        self._count = 0
        self._served: dict[str, float] = {}  # tokens by tenant
        self._least: float | None = 0.0  # tokens of the tenant who is there and has had the fewest; None: not known
        self._num_running: dict[str, int] = {}  # groups by tenant; none that is 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (group for waiting in self._waiting.values() for _, group in waiting)

    def priority(self, group: SequenceGroup) -> int:
        """The smaller, the sooner."""
        return group.request.priority if self._by_priority else 0

    def rank(self, group: SequenceGroup) -> Rank:
        """The order among groups of one tenant."""
        return self.priority(group), not group.was_preempted, group.request.number, group.sequences[0].index

    def add(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        if not self._is_here(tenant):
            self._catch_up(tenant)
        insort(self._waiting.setdefault(tenant, []), (self.rank(group), group))
        self._count += 1

    def discard(self, group: SequenceGroup) -> bool:
        """Take a group out; whether it was in."""
        tenant = group.request.tenant
        waiting = self._waiting.get(tenant, [])
        place = bisect_left(waiting, self.rank(group), key=lambda entry: entry[0])
        if place == len(waiting) or waiting[place][1] is not group:
            return False
        del waiting[place]
        self._count -= 1
        if not waiting:
            del self._waiting[tenant]
            self._least = None
        return True

    def in_order(self) -> Iterator[SequenceGroup]:
        """All that wait now, the next one first. Groups may be admitted meanwhile."""
        return (group for _, group in heapq.merge(*map(self._entries, list(self._waiting))))

    def admit(self, group: SequenceGroup) -> None:
        """A group leaves the queue and runs."""
        self.discard(group)
        self._num_running[group.request.tenant] = self._num_running.get(group.request.tenant, 0) + 1

    def left(self, group: SequenceGroup, count: int = 1) -> None:
        """So many groups of this one's tenant run no longer (of a negative number: more run)."""
        tenant = group.request.tenant
        self._num_running[tenant] -= count
        if not self._num_running[tenant]:
            del self._num_running[tenant]
            self._least = None

    def charge(self, tenant: str, tokens: float) -> None:
        """So many tokens were computed for `tenant`."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens
        self._least = None

    def _is_here(self, tenant: str) -> bool:
        return tenant in self._waiting or tenant in self._num_running

    def _entries(self, tenant: str) -> Iterator[tuple[tuple[float, ...], SequenceGroup]]:
        """Those of one tenant in order, with what they are compared by with those of others."""
        served = self._served.get(tenant, 0.0)
        for (priority, is_new, *order), group in list(self._waiting[tenant]):
            yield (priority, is_new, served if is_new else 0.0, *order), group

    def _catch_up(self, tenant: str) -> None:
        """Who comes back after a while has no claim to what was not asked for meanwhile."""
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._least_served())

    def _least_served(self) -> float:
        """Of those who are there. Who is not is forgotten if that makes no difference, and if nobody is there all are:
        there are as many tenants as users.
        """
        if self._least is None:
            here = {tenant: served for tenant, served in self._served.items() if self._is_here(tenant)}
            least = self._least = min(here.values(), default=0.0)
            gone = {tenant: served for tenant, served in self._served.items() if served > least} if here else {}
            self._served = gone | here
        return self._least
