"""Models that accelerate spreads over devices, CPU memory and disk: where they compute, and what their weights are.

A module whose weights are offloaded holds tensors on "meta", without numbers, between two forwards. Its hook
(`AlignDevicesHook`) knows the device on which it computes and where the numbers lie in the meantime. accelerate itself
is not imported: its hooks are read by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn


def input_device(model: nn.Module) -> torch.device:
    """Where the first module of a model computes, so that inputs go there: never "meta", unless all of it is there and
    nothing knows better.
    """
    first = next(model.parameters(), None)
    if first is not None and not first.is_meta:
        return first.device
    known = (execution_device(module) for module in model.modules())
    return next((device for device in known if device is not None), torch.device("cpu" if first is None else "meta"))


def layer_device(model: nn.Module, layer: int) -> torch.device | None:
    """Where layer number `layer` makes its keys; None where that cannot be told before its first one: the layers of a
    vision tower have such numbers too.
    """
    layers = [module for module in model.modules() if getattr(module, "layer_idx", None) == layer]
    parts = {part for module in layers for part in module.modules()}
    devices = {_computes_on(part, tensor) for part in parts for _, tensor in _parameters(part)}
    return devices.pop() if len(devices) == 1 else None


def has_hooks(model: nn.Module) -> bool:
    """Whether accelerate has wrapped the forward of any module."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a module with a hook of accelerate computes; None for one without, or whose hook lets it be."""
    devices = (getattr(hook, "execution_device", None) for hook in _hooks(module))
    return next((torch.device(device) for device in devices if device is not None), None)


def devices_of(modules: Iterable[nn.Module]) -> list[str]:
    """The device on which each parameter of the modules computes, in their order."""
    return [
        str(_computes_on(module, parameter))
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    ]


def in_runs(devices: Iterable[str]) -> str:
    """Devices in their order, those that follow each other counted: "cpu x 2, cuda:0 x 9, cpu"."""
    runs: list[tuple[str, int]] = []
    for device in devices:
        last, count = runs[-1] if runs else ("", 0)
        runs[-1:] = [(device, count + 1)] if last == device else [*runs[-1:], (device, 1)]
    return ", ".join(device if count == 1 else f"{device} x {count}" for device, count in runs)


def stored_weight(module: nn.Module, name: str) -> Tensor | None:
    """The numbers of a tensor that is on "meta" because it is offloaded; None where nothing knows them. Those of a file
    are mapped into memory, not read.
    """
    for hook in _hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            with suppress(KeyError):  # another hook of the module may have it
                found = weights[name]
                return found if isinstance(found, Tensor) else None
    return None


def home(module: nn.Module) -> int:
    """A number that tells where the offloaded weights of a module lie and where it computes."""
    maps = tuple(id(getattr(hook, "weights_map", None)) for hook in _hooks(module))
    return hash((maps, execution_device(module)))


def _computes_on(module: nn.Module, tensor: Tensor) -> torch.device:
    return execution_device(module) or tensor.device if tensor.is_meta else tensor.device


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on a module itself: one, or those of a SequentialHook."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", None) or (hook,)
