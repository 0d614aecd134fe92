"""Single changes that may make a workload fit, each with its price: about the share of what was asked that it gives up.

The prices put ways in order, and are no measurement: a request that waits is half lost, a token that is refused
whole; quality is put at about twice the share of tokens that come out differently on SmolLM2-135M (`hfpaged quality`);
and what costs money is dearer than what costs none, unless half of the work would be given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hfpaged.planner.change import Change, Maker
from hfpaged.planner.elsewhere import ELSEWHERE
from hfpaged.planner.fit import Fit, fit
from hfpaged.planner.kv_formats import dtype_bytes, plan_format
from hfpaged.planner.pool_layout import why_no_window
from hfpaged.planner.units import counted, decimal

# KV formats that save something: top-1 agreement with the native cache on SmolLM2-135M, and the price.
FORMATS = {"int8": (98.3, 0.04), "k8v4": (97.4, 0.06), "int4": (95.9, 0.10)}
UTILIZATIONS = {0.90: 0.01, 0.95: 0.05}
WEIGHTS = {"int8": 0.12, "int4": 0.25}
LEAST_BUDGET, LEAST_WINDOW = 512, 128
# What no window sees is lost for good, at any price that is still to be paid for all the rest.
FORGETTING = 0.45
# Somebody started it for a reason.
STOPPING = 0.30


def higher_utilization(found: Fit) -> Iterator[Change]:
    """The smallest share that is enough; of a machine's memory, which others live in, no more than asked."""
    case = found.case
    if case.machine.is_cpu or case.choices.pool is not None:
        return
    shares = [share for share in UTILIZATIONS if share > case.choices.utilization]
    for share in shares:
        better = case.choosing(utilization=share)
        if fit(better).fits or share == shares[-1]:
            costs = f"{1 - share:.0%} left for fragments and others"
            yield Change("utilization", f"--utilization {share:.2f}", costs, UTILIZATIONS[share], better)
            return


def free_device(found: Fit) -> Iterator[Change]:
    """Without what others hold of a card now. A machine's memory is never anybody's alone."""
    machine = found.case.machine
    if machine.in_use and not machine.is_cpu and found.case.choices.pool is None:
        better = replace(found.case, machine=replace(machine, in_use=0))
        costs = f"what others do with the {decimal(machine.in_use)} that they hold"
        yield Change("others", "the device for itself alone", costs, STOPPING, better, is_served=False)


def smaller_budget(found: Fit) -> Iterator[Change]:
    """The largest token budget with which it fits, else the least: the activations of a step shrink with it, and what
    prompts take beyond windows.
    """
    budget = found.case.choices.token_budget // 2
    halved = 1
    while budget >= LEAST_BUDGET and (found.case.choices.pool is None or found.passing):
        better = found.case.choosing(token_budget=budget)
        if fit(better).fits or budget // 2 < LEAST_BUDGET:
            title = f"--token-budget {budget}"
            yield Change("budget", title, "prompts take more steps", 0.02 * halved, better)
            return
        budget, halved = budget // 2, halved + 1


def fewer_sequences(found: Fit) -> Iterator[Change]:
    """As many as fit."""
    asked, possible = found.case.workload.concurrency, found.sequences * found.case.choices.replicas
    if asked is None or not 0 < possible < asked:
        return
    case = replace(found.case, workload=replace(found.case.workload, concurrency=possible))
    costs = f"{asked - possible:,} of {asked:,} wait in the queue"
    title = f"{counted(possible, 'request')} at once instead of {asked:,}"
    yield Change("requests", title, costs, 0.5 * (1 - possible / asked), case)


def shorter_context(found: Fit) -> Iterator[Change]:
    """As long as fits, in whole blocks."""
    workload, size = found.case.workload, found.layout.block_size
    context = min(workload.context, found.longest_of(1) // size * size)
    tokens = min(workload.tokens, found.longest // size * size)
    if tokens < 1 or (tokens, context) == (workload.tokens, workload.context):
        return
    if tokens < workload.tokens:
        context = tokens
        title, price = f"requests of {tokens:,} tokens instead of {workload.tokens:,}", 1 - tokens / workload.tokens
    else:
        title, price = f"--context {context} instead of {workload.context}", 1 - context / workload.context
    costs = f"longer ones are refused: {price:.0%} less"
    yield Change("context", title, costs, price, replace(found.case, workload=workload.cut(tokens, context)))


def half_precision(found: Fit) -> Iterator[Change]:
    """Weights, and with them keys and values, in 16 bits instead of 32."""
    case = found.case
    if dtype_bytes(case.choices.dtype or case.sizes.facts.dtype) > 2:
        costs = "rounding: half of the checkpoint's bits"
        yield Change("dtype", "--dtype bfloat16", costs, 0.03, case.choosing(dtype="bfloat16"), same_tokens=False)


def quantized_kv(found: Fit) -> Iterator[Change]:
    """Formats of fewer bytes than the present one."""
    if plan_format(found.case.choices.kv_format).key.bits:
        return
    for name, (top1, price) in FORMATS.items():
        costs = f"quality: top-1 {top1} % on SmolLM2-135M; yours by hfpaged quality"
        better = found.case.choosing(kv_format=name)
        yield Change("kv", f"--kv-dtype {name}", costs, price, better, same_tokens=False)


def smaller_weights(found: Fit) -> Iterator[Change]:
    """Quantized ones; of those that are quantized already the plan says no."""
    case = found.case
    if case.choices.weights_dtype is not None or case.sizes.has_given_weights:
        return
    for name, price in WEIGHTS.items():
        costs = "quality, and another checkpoint"
        yield Change("weights", f"weights in {name}", costs, price, case.choosing(weights_dtype=name), is_served=False)


def window(found: Fit) -> Iterator[Change]:
    """The largest power of two with which it fits, where layers see everything and hold no state."""
    case, tokens = found.case, found.case.workload.tokens
    full = any(layer.kind == "full" for layer in case.sizes.facts.layers)
    if not full or why_no_window(case.sizes.facts) or case.choices.window is not None:
        return
    size = 1 << (tokens - 1).bit_length() >> 1
    while size >= LEAST_WINDOW:
        better = case.choosing(window=size)
        if fit(better).fits or size // 2 < LEAST_WINDOW:
            costs = "forgets what is further back; PagedCache(model, window=), not served"
            price = FORGETTING + 0.5 * (1 - size / tokens)
            yield Change("window", f"--window {size}", costs, price, better, is_served=False)
            return
        size //= 2


CHANGES: tuple[Maker, ...] = (
    higher_utilization, free_device, smaller_budget, fewer_sequences, shorter_context, half_precision, quantized_kv,
    smaller_weights, window, *ELSEWHERE,
)  # fmt: skip
