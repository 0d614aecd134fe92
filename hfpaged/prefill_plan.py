"""How a batch of prompts that begin alike, or that are known in part, is computed with the fewest tokens.

A forward is a rectangle of rows and columns. Its last `tail` columns are computed for all rows at once; what a row
lacks before them is computed for that row alone, as a piece, and shared with all rows that begin like it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillPlan:
    """`tail` columns for all rows, after `pieces`: (row, tokens of it that are known then), in order."""

    tail: int
    pieces: tuple[tuple[int, int], ...]
    cost: int  # tokens computed, padding and the price of the pieces' forwards included


def plan_prefill(
    lengths: Many[int], known: Many[int], order: Many[int], common: Many[int], at_least: int, forward_cost: int
) -> PrefillPlan:
    """The cheapest plan.

    Args:
        lengths, known: tokens of each row, and how many of its first ones are stored already.
        order: the rows such that those which begin alike stand side by side.
        common: common[i] is how many tokens rows order[i - 1] and order[i] have in common; common[0] is 0.
        at_least: columns that the caller wants to see.
        forward_cost: what one more forward costs, in tokens.
    """
    lacking = [length - have for length, have in zip(lengths, known, strict=True)]
    alone = [lengths[row] - max(known[row], shared) for row, shared in zip(order, common, strict=True)]
    tails = {max(tail, at_least) for tail in (*alone, max(lacking), at_least)}
    plans = (_plan(tail, lengths, known, order, common, forward_cost) for tail in sorted(tails, reverse=True))
    return min(plans, key=lambda plan: plan.cost)


def _plan(
    tail: int, lengths: Many[int], known: Many[int], order: Many[int], common: Many[int], forward_cost: int
) -> PrefillPlan:
    pieces = []
    cost = tail * len(lengths)
    computed = 0  # how much of the row looked at last the pieces have computed
    for row, shared in zip(order, common, strict=True):
        computed = min(computed, shared)
        have, wanted = max(known[row], computed), lengths[row] - tail
        if have < wanted:
            cost += wanted - have + forward_cost
            pieces.append((row, wanted))
            computed = wanted
    return PrefillPlan(tail, tuple(pieces), cost)
