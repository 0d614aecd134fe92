"""Out of memory: what a step takes for a while on top of weights and pool."""

from __future__ import annotations

from typing import NamedTuple

from hfpaged.config import format_bytes
from hfpaged.doctor.derived import capacity, has_worked, limit
from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import percent, round_down

# Above this a step that is a little larger fails: torch takes memory from the device in pieces of 2 or 20 MiB and more,
# and cannot always use the holes that it has.
FULL = 0.95
# What to aim at.
ROOMY = 0.9
# Of weights and pool alone: activations of a step of 4096 tokens take some percent of a device.
STATIC_FULL = 0.9
# What a batcher takes by default of a GPU, with all that it needs (hfpaged.engine.sizing).
SHARE = 0.85
# Less of the token budget than this is not advised: steps would do hardly anything.
LEAST_BUDGET = 0.25

MEMORY = "hfpaged_device_memory_bytes"


class Device(NamedTuple):
    """Bytes. `others`: what other processes and the driver take. `peak` is torch's, None where it does not count: a
    process's own peak on a CPU may be that of loading the model.
    """

    name: str
    total: float
    free: float
    reserved: float
    allocated: float
    peak: float | None

    @property
    def others(self) -> float:
        return max(self.total - self.free - max(self.reserved, self.allocated), 0.0)

    @property
    def at_peak(self) -> float:
        """As a part of the device; without a peak as it is now."""
        taken = self.total - self.free if self.peak is None else self.others + self.peak
        return taken / self.total

    @property
    def activations(self) -> float:
        """What steps have taken for a while at most: weights and pool are allocated once and for all."""
        return max((self.peak or 0.0) - self.allocated, 0.0)


def devices(reading: Reading) -> list[Device]:
    """Those whose size is known. Raises Lacks."""
    names = [name for name, total in reading.by(MEMORY, "device").items() if total > 0]
    return [device for device in (_device(reading, name) for name in names) if device.total > 0]


def _device(reading: Reading, name: str) -> Device:
    found = reading.samples[MEMORY]
    kinds = {each.labels.get("kind"): each.value for each in found if each.labels.get("device") == name}
    total, free, reserved, allocated = (kinds.get(kind, 0.0) for kind in ("total", "free", "reserved", "allocated"))
    return Device(name, total, free, reserved, allocated, None if name.startswith("cpu") else kinds.get("peak"))


def memory_at_peak(reading: Reading) -> Finding | None:
    """Peaks of activations reach the end of the device."""
    worst = max(devices(reading), key=lambda device: device.at_peak, default=None)
    if worst is None or worst.at_peak < FULL:
        return None
    if worst.peak is None:
        return _host_full(worst)
    evidence = (
        f"{worst.name} had {format_bytes(worst.peak)} allocated at its peak, {format_bytes(worst.activations)} of them "
        f"for the activations of a step, and others hold {format_bytes(worst.others)}: {percent(worst.at_peak)} of "
        f"{format_bytes(worst.total)} (torch holds {format_bytes(worst.reserved)} now)"
    )
    return Finding(
        "problem",
        "Out of memory is near: activations peak at the end of the device",
        evidence,
        _smaller(reading, worst),
    )


def _smaller(reading: Reading, device: Device) -> str:
    excess = (device.at_peak - ROOMY) * device.total
    pool = capacity(reading)
    ways = [f"a pool of {format_bytes(pool)} -> {format_bytes(pool - excess)} (memory=)"] if pool > excess else []
    left = 1 - excess / device.activations if device.activations else 0.0
    if left >= LEAST_BUDGET:
        ways.insert(0, _smaller_step(reading, left))
    if device.others > excess:
        ways.append(f"stop what else holds memory of {device.name}")
    return f"free {format_bytes(excess)}: {', or '.join(ways) or 'use a larger device or smaller weights'}"


def _smaller_step(reading: Reading, left: float) -> str:
    """With so much `left` of its activations. Without an engine it is that of a call of generate()."""
    if not reading.get("hfpaged_engine_limit"):
        return "a smaller batch or shorter prompts in a call of generate()"
    budget = limit(reading, "max_num_batched_tokens")
    return f"max_num_batched_tokens {budget} -> {round_down(budget * left)}"


def _host_full(device: Device) -> Finding:
    evidence = f"{format_bytes(device.free)} of {format_bytes(device.total)} are free on {device.name}"
    excess = (device.at_peak - ROOMY) * device.total
    remedy = f"free {format_bytes(excess)}: give the pool less (memory=), or stop what else runs there"
    return Finding("problem", f"Out of memory is near: {device.name} is full", evidence, remedy)


def weights_and_pool(reading: Reading) -> Finding | None:
    """Known before a step has been made: nothing is left for activations."""
    found = devices(reading)
    total = sum(device.total for device in found)
    weights, pool = reading.total("hfpaged_model_weights_bytes"), capacity(reading)
    is_measured = has_worked(reading) and all(device.peak is not None for device in found)
    if not total or is_measured or (weights + pool) / total < STATIC_FULL:
        return None
    evidence = (
        f"weights of {format_bytes(weights)} and a pool of {format_bytes(pool)} are "
        f"{percent((weights + pool) / total)} of {format_bytes(total)}, before any step needs memory for activations"
    )
    fitting = SHARE * total - weights
    remedy = (
        f"a pool of {format_bytes(pool)} -> {format_bytes(fitting)} (memory=), or memory={SHARE}, which measures a step"
        if fitting > 0
        else "a larger device, or smaller weights: they alone leave no room for a pool"
    )
    return Finding("problem", "Weights and pool take nearly all memory", evidence, remedy)
