"""Who is next: by priority, preempted before new, then a fair share for each tenant, then order of arrival.

The share is counted in tokens as in the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large
Language Models" (arXiv 2401.00588): of the tenants that wait, the one that has had the fewest is served.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterator

from hfpaged.engine.request import SequenceGroup

Rank = tuple[int, int, int, int]


class WaitingQueue:
    """Groups that hold no block. Without `by_priority` all have the same priority."""

    def __init__(self, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._waiting: dict[str, list[tuple[Rank, SequenceGroup]]] = {}  # by tenant, each in order
        self._served: dict[str, float] = {}  # tokens by tenant
        self._num_running: dict[str, int] = {}  # groups by tenant

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

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
        if not self._waiting.get(tenant) and not self._num_running.get(tenant):
            self._catch_up(tenant)
        insort(self._waiting.setdefault(tenant, []), (self.rank(group), group), key=lambda entry: entry[0])

    def discard(self, group: SequenceGroup) -> bool:
        """Take a group out; whether it was in."""
        waiting = self._waiting.pop(group.request.tenant, [])
        kept = [entry for entry in waiting if entry[1] is not group]
        if kept:  # who asks for nothing now costs nothing
            self._waiting[group.request.tenant] = kept
        return len(kept) < len(waiting)

    def first(self, passing: Container[SequenceGroup] = ()) -> SequenceGroup | None:
        """The next group to be admitted, but for those that are passed by for now."""
        heads = (self._head(waiting, passing) for waiting in self._waiting.values())
        best = min((head for head in heads if head), key=lambda head: head[0], default=None)
        return best[1] if best else None

    def admit(self, group: SequenceGroup) -> None:
        """A group leaves the queue and runs."""
        self.discard(group)
        self._num_running[group.request.tenant] = self._num_running.get(group.request.tenant, 0) + 1

    def left(self, group: SequenceGroup, count: int = 1) -> None:
        """So many groups of this one's tenant run no longer (of a negative number: more run)."""
        self._num_running[group.request.tenant] -= count

    def charge(self, tenant: str, tokens: float) -> None:
        """So many tokens were computed for `tenant`."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def _head(
        self, waiting: list[tuple[Rank, SequenceGroup]], passing: Container[SequenceGroup]
    ) -> tuple[tuple[float, ...], SequenceGroup] | None:
        entry = next(((rank, group) for rank, group in waiting if group not in passing), None)
        if entry is None:
            return None
        (priority, is_new, *order), group = entry
        share = self._served.get(group.request.tenant, 0.0) if is_new else 0.0
        return (priority, is_new, share, *order), group

    def _catch_up(self, tenant: str) -> None:
        """Who comes back after a while has no claim to what was not asked for meanwhile."""
        present = [
            other for other in self._served if self._waiting.get(other) or self._num_running.get(other)
        ]  # fmt: skip
        least = min((self._served[other] for other in present), default=0.0)
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)
