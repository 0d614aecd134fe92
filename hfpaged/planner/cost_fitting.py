"""A cost model from steps that were measured: least squares, where a step may be off by a share of its own time, and no
cost is below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.cost_model import CostModel
from hfpaged.planner.trace import TraceStep

FEWEST = 20  # steps, of which four numbers can be told
# A step that is off by so many times the usual share counts less, one by so many does not count: others had the
# machine, or a kernel was built.
OFF, FAR_OFF = 2.0, 20.0
ROUNDS = 20

Row = tuple[float, float, float, float]


@dataclass(frozen=True)
class CostFit:
    """How well a model tells the steps that it was made from: `r2` is the share of their variance that it explains (1
    is all), `median_error` the half of the steps is closer than that share of their time to. `left_out` steps were far
    off and not looked at.
    """

    cost: CostModel
    steps: int
    left_out: int
    r2: float
    median_error: float


def fit_cost(steps: Sequence[TraceStep], token_bytes: float = 0.0) -> CostFit:
    """The costs that come nearest to these steps. Raises InvalidConfigError for too few."""
    good = [step for step in steps if step.seconds > 0]
    if len(good) < FEWEST:
        raise InvalidConfigError(
            f"{len(good)} measured steps are too few to tell what a step costs; at least {FEWEST} are needed: record "
            "for longer, or give --cost"
        )
    numbers = _solve(good, [1.0] * len(good))
    for _ in range(ROUNDS):
        numbers = _solve(good, _weights(numbers, good))
    usual = median(_error(numbers, step) for step in good)
    kept = [step for step in good if _error(numbers, step) <= max(FAR_OFF * usual, 1e-9)]
    step, prefill, decode, context = numbers
    cost = CostModel(step, prefill, decode, context, f"fitted from {len(kept)} measured steps", token_bytes)
    return CostFit(
        cost, len(kept), len(good) - len(kept), _r2(numbers, kept), median(_error(numbers, step) for step in kept)
    )  # fmt: skip


def _row(step: TraceStep) -> Row:
    return 1.0, float(step.prefill), float(step.decodes), float(step.context)


def _told(numbers: Sequence[float], step: TraceStep) -> float:
    return sum(number * part for number, part in zip(numbers, _row(step), strict=True))


def _error(numbers: Sequence[float], step: TraceStep) -> float:
    """As a share of what it is told to take."""
    told = _told(numbers, step)
    return abs(told - step.seconds) / told if told > 0 else float("inf")


def _weights(numbers: Sequence[float], steps: Sequence[TraceStep]) -> list[float]:
    """A step may be off by a share of what it should take; those far off count less (Huber 1964, by reweighting)."""
    errors = [_error(numbers, step) for step in steps]
    most = OFF * 1.4826 * median(errors) or 1e-9
    told = [_told(numbers, step) for step in steps]
    return [
        min(1.0, most / error) / seconds**2 if error > 0 and seconds > 0 else 1 / max(seconds, 1e-9) ** 2
        for error, seconds in zip(errors, told, strict=True)
    ]


def _r2(numbers: Sequence[float], steps: Sequence[TraceStep]) -> float:
    mean = fmean(step.seconds for step in steps)
    all_of_it = sum((step.seconds - mean) ** 2 for step in steps)
    left = sum((step.seconds - _told(numbers, step)) ** 2 for step in steps)
    return 1 - left / all_of_it if all_of_it else 1.0


def _solve(steps: Sequence[TraceStep], weights: Sequence[float]) -> list[float]:
    """The numbers of 0 or more with the least weighted squares: of the choices of those that are not 0 the best one, as
    there are only 15 (the conditions of Karush, Kuhn and Tucker, by trying).
    """
    rows = [_row(step) for step in steps]
    scales = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    products = [[0.0] * 4 for _ in range(4)]
    sums, squares = [0.0] * 4, 0.0
    for row, step, weight in zip(rows, steps, weights, strict=True):
        parts = [value / scale for value, scale in zip(row, scales, strict=True)]
        squares += weight * step.seconds**2
        for i in range(4):
            sums[i] += weight * parts[i] * step.seconds
            for j in range(4):
                products[i][j] += weight * parts[i] * parts[j]
    best, least = [0.0] * 4, float("inf")
    for choice in range(1, 16):
        used = [part for part in range(4) if choice >> part & 1]
        found = _gauss([[products[i][j] for j in used] + [sums[i]] for i in used])
        if found is None or min(found) < 0:
            continue
        left = squares - sum(sums[part] * number for part, number in zip(used, found, strict=True))
        if left < least:
            least, best = left, [0.0] * 4
            for part, number in zip(used, found, strict=True):
                best[part] = number / scales[part]
    return best


def _gauss(rows: list[list[float]]) -> list[float] | None:
    """What solves these equations (coefficients and right side by row); None where they do not tell."""
    size = len(rows)
    largest = max(abs(rows[place][place]) for place in range(size)) or 1.0
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        if abs(rows[place][place]) < 1e-11 * largest:
            return None
        for row in range(size):
            if row != place:
                factor = rows[row][place] / rows[place][place]
                rows[row] = [mine - factor * other for mine, other in zip(rows[row], rows[place], strict=True)]
    return [rows[place][size] / rows[place][place] for place in range(size)]
