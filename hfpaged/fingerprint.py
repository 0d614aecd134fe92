"""What tells one model from another: a hash of its config, of the names of its classes, and of its weights.

Asked for at each admission, as weights may be trained or merged in place between two calls: keys of other weights must
never be found. All of a tensor is read when it comes and when torch has counted a change; a sample is read each time,
for changes that torch does not count.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpaged.block_hash import ExtraKey
from hfpaged.onednn_weight import OnednnWeight
from hfpaged.spread import devices_of, home, in_runs, stored_weight
from hfpaged.weight_contents import WeightContents, plain_parts

_HARMLESS = {"accelerate", "hfpaged", "peft", "torch", "transformers"}
SAMPLES = 8  # numbers of each tensor
# What a config says about its origin (some of it only once the model was saved) and about how the same numbers are
# computed.
_IGNORED = {"_name_or_path", "transformers_version", "architectures"}
_IGNORED |= {"dtype", "torch_dtype", "_attn_implementation", "use_cache"}


@dataclass
class Weights:
    """What need not be made again while a model has the same tensors. It keeps none of them alive: a model that moves
    to another device leaves its memory behind.
    """

    addresses: list[int]
    shapes: bytes
    devices: tuple[str, ...]  # on which the parameters compute
    layout: str  # the same in the order of the parameters: where each layer's blocks lie follows from it
    contents: WeightContents


_known: weakref.WeakKeyDictionary[nn.Module, Weights] = weakref.WeakKeyDictionary()


def model_fingerprint(model: nn.Module, config: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256, the same in every process that loads the same weights in the same dtypes, on whatever
    devices they lie. Weights that nobody can read (on "meta", with nothing that knows where their numbers are) have
    another fingerprint each time.
    """
    tensors, weights = _read(model)
    return _fingerprint(tensors, weights, config)


def has_hidden_weights(model: nn.Module) -> bool:
    """Whether there are weights that nobody can read, so that no fingerprint would see them change."""
    return any(
        parameter.is_meta and stored_weight(module, name) is None
        for module in _modules(model)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )


def _fingerprint(tensors: list[Tensor], weights: Weights, config: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(_without_origin(config), sort_keys=True, default=str).encode())
    digest.update(weights.shapes)
    digest.update(weights.contents.digest(tensors, weights.addresses))
    alike: dict[torch.dtype, list[Tensor]] = {}
    if any(tensor.is_meta and isinstance(tensor, nn.Parameter) for tensor in tensors):
        digest.update(secrets.token_bytes(32))
    for part in (part for tensor in tensors for part in plain_parts(tensor, _sample_of)):
        if not part.is_meta and part.numel():
            alike.setdefault(part.dtype, []).append(sample(part))
    for samples in alike.values():
        digest.update(_on_host(samples).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _on_host(samples: Sequence[Tensor]) -> Tensor:
    """All of them in one, in their order; one copy for each device that they come from."""
    places: dict[torch.device, list[int]] = {}
    for place, part in enumerate(samples):
        places.setdefault(part.device, []).append(place)
    if len(places) == 1:
        return torch.cat(list(samples)).cpu()
    there = [place for those in places.values() for place in those]
    brought = torch.cat([torch.cat([samples[place] for place in those]).cpu() for those in places.values()])
    parts = dict(zip(there, brought.split([samples[place].numel() for place in there]), strict=True))
    return torch.cat([parts[place] for place in range(len(samples))])


def model_keys(model: Any) -> tuple[ExtraKey, ...]:
    """What of the extra keys a transformers model decides by itself: its fingerprint, first, and its devices, where
    its blocks lie.
    """
    tensors, weights = _read(model)
    fingerprint = ExtraKey("model", _fingerprint(tensors, weights, model.config.to_dict()))
    return fingerprint, ExtraKey("device", weights.layout)


def single_device(model: nn.Module) -> torch.device | None:
    """Where a model computes, None for one that is spread over devices."""
    devices = weights_of(model).devices
    return None if len(devices) > 1 else torch.device(devices[0] if devices else "cpu")


def weights_of(model: nn.Module) -> Weights:
    """Where the weights of a model are now."""
    return _read(model)[1]


def _read(model: nn.Module) -> tuple[list[Tensor], Weights]:
    """(all tensors, those that are offloaded as what is stored of them; what need not be made again)"""
    modules = _modules(model)
    tensors = _tensors(modules)
    if any(tensor.is_meta for tensor in tensors):
        tensors, addresses = _behind(modules)
    else:
        addresses = [_address(tensor) for tensor in tensors]
    known = _known.get(model)
    if known is None or known.addresses != addresses:
        contents = WeightContents() if known is None else known.contents
        known = _known[model] = _look_at(model, addresses, contents)
    return tensors, known


def _behind(modules: list[nn.Module]) -> tuple[list[Tensor], list[int]]:
    """`_tensors` and their addresses, where some are offloaded."""
    tensors: list[Tensor] = []
    addresses: list[int] = []
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                stored = stored_weight(module, name) if tensor.is_meta else None
                tensors.append(tensor if stored is None else stored)
                addresses.append(hash((home(module), name)) if tensor.is_meta else _address(tensor))
    return tensors, addresses


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules inside, each once. A quarter of the time of model.modules(), which makes their names on its way: this
    is asked in the middle of a generation, once per block.
    """
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            left += module._modules.values()
    return list(found)


def _tensors(modules: list[nn.Module]) -> list[Tensor]:
    """All parameters and buffers, tied ones more than once."""
    found: list[Tensor | None] = []
    for module in modules:
        found += module._parameters.values()
        found += module._buffers.values()
    return [tensor for tensor in found if tensor is not None]


def hook_keys(model: nn.Module) -> list[ExtraKey]:
    """Hooks that may change what a layer computes, by the numbers under which torch keeps them, each given once in a
    process. Those of the libraries that we know change nothing, or tell it in another way.
    """
    return [
        ExtraKey("hook", f"{place}.{number}")
        for place, module in enumerate(_modules(model))
        if module._forward_hooks or module._forward_pre_hooks
        for number, hook in (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
        if _home(hook) not in _HARMLESS
    ]


def _home(hook: Any) -> str:
    """The library that a hook comes from."""
    code = getattr(hook, "func", hook)
    return str(getattr(code, "__module__", type(code).__module__)).split(".")[0]


def _look_at(model: nn.Module, addresses: list[int], contents: WeightContents) -> Weights:
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # once offloaded they are no longer one tensor
    named = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not (tensor.is_meta and name in tied)
    ]
    shapes = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}{_part(tensor)}" for name, tensor in named)
    # What computes with them: code that came with the weights says its revision in the names of its modules.
    classes = sorted({f"{type(module).__module__}.{type(module).__qualname__}" for module in _modules(model)})
    devices = devices_of(model.modules())
    layout = in_runs(devices) if len(set(devices)) > 1 else "".join(devices[:1])
    return Weights(addresses, f"{classes} {shapes}".encode(), tuple(sorted(set(devices))), layout, contents)


def _part(tensor: Any) -> str:
    """Which part of a weight that is spread over processes this one has."""
    if not hasattr(tensor, "device_mesh"):
        return ""
    mesh = tensor.device_mesh
    return f" {tensor.placements} {mesh.get_coordinate()} of {tuple(mesh.shape)}"


def _without_origin(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {str(key): _without_origin(value) for key, value in part.items() if key not in _IGNORED}
    return part


def _address(tensor: Tensor) -> int:
    if type(tensor) is OnednnWeight:
        return id(tensor)
    try:
        return getattr(tensor, "_local_tensor", tensor).data_ptr() or id(tensor)  # 0: nothing, or a device's secret
    except RuntimeError:  # a tensor subclass without memory of its own
        return id(tensor)


def _sample_of(packed: OnednnWeight) -> Tensor:
    return packed.sample if packed.successor is None else sample(packed.successor.detach())


def sample(tensor: Tensor) -> Tensor:
    """A view of a few numbers from all over the tensor; of one that does not lie in a row, from its diagonal."""
    if tensor.is_contiguous():
        step = max(1, tensor.numel() // SAMPLES)
        return tensor.as_strided((min(SAMPLES, tensor.numel()),), (step,))
    step = max(1, min(tensor.shape) // SAMPLES)
    count = min(SAMPLES, -(-min(tensor.shape) // step))
    return tensor.as_strided((count,), (step * sum(tensor.stride()),))
