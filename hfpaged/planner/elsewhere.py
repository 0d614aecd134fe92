"""Changes that take other devices, or more of them: each costs money, unless they are here already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hfpaged.planner.cards import CARDS, Card
from hfpaged.planner.case import Case
from hfpaged.planner.change import Change, Maker
from hfpaged.planner.devices import machine_with
from hfpaged.planner.fit import Fit, fit
from hfpaged.planner.tp_plan import tp_plan
from hfpaged.planner.units import counted

RANKS = {2: 0.60, 4: 0.75, 8: 0.90}
OTHER_CARD = 0.55
MOST_REPLICAS = 64


def other_card(found: Fit) -> Iterator[Change]:
    """The smallest in the table that is enough."""
    for card in _larger_cards(found.case):
        better = _on(card, found.case)
        if fit(better).fits:
            yield _elsewhere("card", f"another card: {card.name}", f"money: {_sheet(card)}", OTHER_CARD, better)
            return


def more_ranks(found: Fit) -> Iterator[Change]:
    """The smallest degree of tensor parallelism that is enough."""
    if found.case.machine.is_cpu or found.case.choices.pool is not None:
        return
    for ranks in _degrees(found.case):
        better = found.case.choosing(tp=ranks)
        if fit(better).fits:
            cards = ranks * found.case.choices.replicas
            yield _on_several("tp", f"--tp {ranks} on {cards} such cards", cards, RANKS[ranks], better)
            return


def more_replicas(found: Fit) -> Iterator[Change]:
    """The fewest that are enough, where one more request would not fit but each fits."""
    asked, choices = found.asked, found.case.choices
    if asked is None or not found.sequences or found.case.machine.is_cpu or choices.pool is not None:
        return
    count = -(-(found.case.workload.concurrency or 1) // found.sequences)
    while count <= MOST_REPLICAS:
        better = found.case.choosing(replicas=count)
        if fit(better).fits:
            cards = count * choices.tp
            price = RANKS[2] + 0.15 * math.log2(count / 2) + 0.01  # a TP of as many gives one larger pool
            yield _on_several("replicas", f"--replicas {count} on {cards} such cards", cards, price, better)
            return
        count += 1


def several_cards(found: Fit) -> Iterator[Change]:
    """The fewest other cards, and of those the smallest, where neither one other card nor more of this kind do."""
    if any(other_card(found)) or any(more_ranks(found)):
        return
    for ranks in _degrees(found.case):
        for card in _larger_cards(found.case):
            better = _on(card, found.case).choosing(tp=ranks)
            if fit(better).fits:
                costs = f"money: {ranks} cards, each with {_sheet(card)}"
                yield _elsewhere("cards", f"--tp {ranks} on {ranks} x {card.name}", costs, 0.2 + RANKS[ranks], better)
                return


def _on_several(kind: str, title: str, cards: int, price: float, case: Case) -> Change:
    """Served as it is where so many cards are here."""
    are_here = case.machine.count >= cards
    fitting = counted(fit(case).sequences * case.choices.replicas, "request")
    costs = f"{'they are here' if are_here else 'money'}: {cards} cards; {fitting} would fit"
    both = case.choices.tp > 1 and case.choices.replicas > 1
    return Change(kind, title, costs, price, case, is_served=are_here and not both, same_machine=are_here)


def _elsewhere(kind: str, title: str, costs: str, price: float, case: Case) -> Change:
    return Change(kind, title, costs, price, case, is_served=False, same_machine=False)


def _larger_cards(case: Case) -> list[Card]:
    if case.choices.pool is not None:
        return []
    return [card for card in CARDS if card.memory > case.machine.memory or case.machine.is_cpu]


def _on(card: Card, case: Case) -> Case:
    machine = replace(machine_with(card), overhead=case.machine.overhead)
    return replace(case, machine=machine).choosing(utilization=max(0.85, case.choices.utilization))


def _degrees(case: Case) -> list[int]:
    """More ranks than now; none for what ranks cannot do."""
    if not tp_plan(case.sizes.facts) or case.choices.swap_space or case.choices.store_size:
        return []
    return [ranks for ranks in RANKS if ranks > case.choices.tp]


def _sheet(card: Card) -> str:
    return f"{card.gib:g} GiB that are read at {card.bandwidth:,} GB/s"


ELSEWHERE: tuple[Maker, ...] = (other_card, more_ranks, more_replicas, several_cards)
