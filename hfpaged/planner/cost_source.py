"""Where the cost of a step comes from: what was given, what a trace has measured, or an assumption that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.cost_fitting import FEWEST, CostFit, fit_cost
from hfpaged.planner.cost_model import CostModel, parse_cost
from hfpaged.planner.fit import Fit
from hfpaged.planner.trace import Trace
from hfpaged.planner.trace_reading import TraceError, read_steps

# GB/s of memory, where a device is not in the table of cards: a usual card of servers, and a usual processor.
GPU_BANDWIDTH, CPU_BANDWIDTH = 1000, 40
# Operations that a device really does while it reads one byte; data sheets promise twice as many.
GPU_INTENSITY, CPU_INTENSITY = 100, 10
# Seconds of Python, of starting kernels and of sampling: of a step, and of a sequence in it.
STEP_OVERHEAD, SEQUENCE_OVERHEAD = 3e-3, 2e-5


@dataclass(frozen=True)
class KnownCost:
    """A cost, and how well it fits where it was fitted. `assumed`: nothing was measured."""

    cost: CostModel
    fit: CostFit | None = None
    assumed: bool = False


def known_cost(given: str | None, trace: Trace, found: Fit) -> KnownCost:
    """By --cost, else by the steps in the trace, else assumed. Raises InvalidConfigError."""
    if given is not None:
        return _of_file(Path(given)) if "=" not in given else KnownCost(parse_cost(given))
    if len(trace.steps) >= FEWEST:
        told = trace.header.get("token_bytes")
        fitted = fit_cost(trace.steps, float(told) if isinstance(told, (int, float)) else 0.0)
        return KnownCost(fitted.cost, fitted)
    return KnownCost(roofline(found), assumed=True)


def roofline(found: Fit) -> CostModel:
    """What a step would take if reading weights and tokens from memory, and the multiplications of prompts, were all
    (Williams et al. 2009, CACM 52(4)), and a fixed sum for everything else.
    """
    machine = found.case.machine
    bandwidth = machine.bandwidth or (CPU_BANDWIDTH if machine.is_cpu else GPU_BANDWIDTH)
    second = bandwidth * 1e9
    operations = second * (CPU_INTENSITY if machine.is_cpu else GPU_INTENSITY)
    layout = found.layout
    token_bytes = layout.block_bytes * len(layout.windows) / layout.block_size
    known = "" if machine.bandwidth else ", which is a guess for this machine"
    return CostModel(
        step=STEP_OVERHEAD + found.weights.bytes / second,
        prefill=found.weights.bytes / operations,  # two operations for each weight of two bytes
        decode=SEQUENCE_OVERHEAD,
        context=token_bytes / second,
        source=f"assumed, not measured: weights and tokens read at {bandwidth} GB/s{known}",
        token_bytes=token_bytes,
    )


def _of_file(path: Path) -> KnownCost:
    """A JSON object with a, b, c and d, or lines of steps as `hfpaged serve --record` writes them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"--cost {path} is no file that can be read ({error}); write a=0.01,b=2e-5,c=1e-4,d=1e-8, or name a file "
            "with such an object or with measured steps"
        ) from error
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "kind" not in whole:
        return KnownCost(parse_cost(",".join(f"{name}={value}" for name, value in whole.items())))
    try:
        fitted = fit_cost(read_steps(path))
    except TraceError as error:
        raise InvalidConfigError(str(error)) from error
    return KnownCost(fitted.cost, fitted)
