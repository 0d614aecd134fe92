"""`--for serve`: the command line of `hfpaged serve` that a plan recommends."""

from __future__ import annotations

from collections.abc import Sequence

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import USUAL_SEQUENCES
from hfpaged.planner.fit import Fit
from hfpaged.planner.ways_out import WayOut


def check_servable(found: Fit) -> None:
    """Raises InvalidConfigError for what `hfpaged serve` has no flag for."""
    choices = found.case.choices
    if choices.window is not None:
        raise InvalidConfigError("--window is nothing that `hfpaged serve` does; leave it out, or lower --context")
    if choices.tp > 1 and choices.replicas > 1:
        raise InvalidConfigError(
            f"--tp {choices.tp} with --replicas {choices.replicas}: `hfpaged serve` does one of the two; plan one "
            "service with --tp, and start several"
        )
    if choices.store_size and found.case.store is None:
        raise InvalidConfigError(
            "--prefix-store-size needs a place for a line of `hfpaged serve`: add --prefix-store DIR"
        )
    if choices.weights_dtype is not None:
        raise InvalidConfigError(
            f"--weights-dtype {choices.weights_dtype}: `hfpaged serve` takes weights as they are; give the quantized "
            "checkpoint as MODEL"
        )
    if found.case.sizes.facts.cross_layers:
        raise InvalidConfigError("a model with an encoder is nothing that `hfpaged serve` serves; use generate()")


def recommended(found: Fit, ways: Sequence[WayOut]) -> Fit | None:
    """The plan itself where it fits, else the cheapest way out that `hfpaged serve` has flags for; one that changes
    tokens where nothing else helps alone.
    """
    if found.fits:
        return found
    served = sorted((way for way in ways if way.is_served), key=lambda way: not way.same_tokens)
    return served[0].fit if served else None


def seats_remark(found: Fit) -> list[str]:
    """Why the line lets fewer requests run than fit, where it does."""
    if found.asked is not None or found.concurrency <= USUAL_SEQUENCES:
        return []
    return [
        f"{USUAL_SEQUENCES} of these requests at once, as beyond that each waits longer for its next token than the "
        f"batch gains; say --concurrency {found.concurrency} where all are to run"
    ]


def serve_words(found: Fit, model: str) -> list[str]:
    """The words of the command line."""
    choices, workload = found.case.choices, found.case.workload
    sequences = found.asked or min(found.concurrency, USUAL_SEQUENCES)
    pool = choices.pool
    if found.case.machine.is_cpu and choices.replicas > 1:  # each would take the share of all
        pool = found.pool
    flags: dict[str, object] = {
        "--device": "cpu" if found.case.machine.is_cpu and choices.tp == 1 else None,
        "--dtype": choices.dtype,
        "--max-model-len": workload.context,
        "--kv-cache-dtype": choices.kv_format,
        "--block-size": choices.block_size,
        "--gpu-memory-utilization": None if pool is not None else f"{choices.utilization:g}",
        "--kv-cache-memory": pool,
        "--max-num-seqs": sequences,
        "--max-num-batched-tokens": max(choices.token_budget, sequences),
        "--swap-space": choices.swap_space or None,
        "--prefix-store": found.case.store,
        "--prefix-store-size": choices.store_size or None,
        "--replicas": choices.replicas if choices.replicas > 1 else None,
    }
    given = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    if choices.tp > 1:
        return ["torchrun", "--nproc-per-node", str(choices.tp), "-m", "hfpaged.serve", model, "--tp", *given]
    return ["hfpaged", "serve", model, *given]
