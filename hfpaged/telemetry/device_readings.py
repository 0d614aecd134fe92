"""Memory of the devices that models lie on, beside that of their pools."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hfpaged.telemetry.readings import Readings

if TYPE_CHECKING:
    import torch

    from hfpaged.kv_pool import KVPool


def read_devices(readings: Readings, pools: Iterable[KVPool], name: str | None = None) -> None:
    """The weights of the models of `pools`, and the memory of the devices that these or the pools lie on, all under
    `name` if there is one.
    """
    devices: dict[str, dict[torch.device, None]] = {}
    models: dict[str, dict[Any, None]] = {}
    for pool in pools:
        owner = pool.counts.model_name if name is None else name
        models.setdefault(owner, {}).update(dict.fromkeys(pool.user_models()))
        devices.setdefault(owner, {}).update(dict.fromkeys(pool.storage.devices))
    for owner, users in models.items():
        sizes: Counter[torch.device] = Counter()
        for model in users:
            sizes += _weights(model)
        for device, size in sizes.items():
            readings.count(owner, "hfpaged_model_weights_bytes", size, str(device))
        for device in sizes | devices[owner]:
            for kind, size in memory_of(device).items():
                readings.most(owner, "hfpaged_device_memory_bytes", size, str(device), kind)


def _weights(model: Any) -> Counter[torch.device]:
    """Bytes by device; "meta" are those that a device map keeps elsewhere and brings layer by layer."""
    sizes: Counter[torch.device] = Counter()
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            sizes[tensor.device] += tensor.nbytes
    return sizes


def memory_of(device: torch.device) -> dict[str, int]:
    """Bytes by kind: total and free of the device; reserved, allocated and at most allocated (peak) by this process.
    Of a CPU the process's resident set is what it has allocated.
    """
    if device.type == "cpu":
        return _host_memory()
    return _cuda_memory(device) if device.type == "cuda" else {}


def _host_memory() -> dict[str, int]:
    import psutil

    machine = psutil.virtual_memory()
    found = {"total": machine.total, "free": machine.available, "allocated": psutil.Process().memory_info().rss}
    try:
        import resource
    except ImportError:  # Windows has none
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return found | {"peak": max(peak, found["allocated"])}


def _cuda_memory(device: torch.device) -> dict[str, int]:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {
        "total": total, "free": free, "reserved": torch.cuda.memory_reserved(device),
        "allocated": torch.cuda.memory_allocated(device), "peak": torch.cuda.max_memory_allocated(device),
    }  # fmt: skip
