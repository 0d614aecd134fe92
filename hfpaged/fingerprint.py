"""What tells one model from another: a hash of its config and of a sample of its weights.

Read again at each admission, as weights may be trained or merged in place between two calls: keys of other weights
must never be found. A sample of each tensor is enough, because whatever trains a tensor moves all of it.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpaged.block_hash import ExtraKey

SAMPLES = 8  # numbers of each tensor
# What a config says about its origin and about how the same numbers are computed.
_IGNORED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "use_cache"}


@dataclass
class Weights:
    """What need not be made again while a model has the same tensors: views of their samples see new numbers."""

    addresses: list[int]
    shapes: bytes
    samples: list[list[Tensor]]  # those of one device and dtype side by side
    devices: tuple[str, ...]  # of the parameters


_known: weakref.WeakKeyDictionary[nn.Module, Weights] = weakref.WeakKeyDictionary()


def model_fingerprint(model: nn.Module, config: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256, the same in every process that loads the same weights in the same dtypes."""
    return fingerprint_of(weights_of(model), config)


def fingerprint_of(weights: Weights, config: Mapping[str, Any]) -> str:
    """The same, of weights that were looked at just now."""
    digest = hashlib.sha256(json.dumps(_without_origin(config), sort_keys=True, default=str).encode())
    digest.update(weights.shapes)
    for alike in weights.samples:
        digest.update(torch.cat(alike).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def model_keys(model: Any) -> tuple[ExtraKey, ...]:
    """What of the extra keys a transformers model decides by itself: its fingerprint, first, and its devices, where
    its blocks lie.
    """
    weights = weights_of(model)
    fingerprint = ExtraKey("model", fingerprint_of(weights, model.config.to_dict()))
    return fingerprint, *(ExtraKey("device", device) for device in weights.devices)


def single_device(model: nn.Module) -> torch.device | None:
    """Where a model computes, None for one that is spread over devices."""
    devices = weights_of(model).devices
    is_spread = len(devices) > 1 or len(getattr(model, "hf_device_map", None) or ()) > 1
    return None if is_spread else torch.device(devices[0] if devices else "cpu")


def weights_of(model: nn.Module) -> Weights:
    """Where the weights of a model are now."""
    addresses = [_address(tensor) for tensor in _tensors(model)]
    known = _known.get(model)
    if known is None or known.addresses != addresses:
        known = _known[model] = _look_at(model, addresses)
    return known


def _tensors(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers, tied ones more than once. A quarter of the time of model.parameters(), which makes
    their names on its way: this is asked in the middle of a generation, once per block.
    """
    found: list[Tensor | None] = []
    seen: set[nn.Module] = set()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        found += module._parameters.values()
        found += module._buffers.values()
        left += module._modules.values()
    return [tensor for tensor in found if tensor is not None]


def _look_at(model: nn.Module, addresses: list[int]) -> Weights:
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)
    plain = [part for _, tensor in named for part in _plain(tensor)]
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in plain:
        if part.device.type != "meta" and part.numel():
            alike.setdefault((part.device, part.dtype), []).append(_sample(part))
    devices = {str(parameter.device) for parameter in model.parameters()}
    return Weights(addresses, shapes.encode(), list(alike.values()), tuple(sorted(devices)))


def _without_origin(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {str(key): _without_origin(value) for key, value in part.items() if key not in _IGNORED}
    return part


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor subclass without memory of its own
        return id(tensor)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor, or the subclass of a quantization library, is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor.detach().as_subclass(Tensor)


def _sample(tensor: Tensor) -> Tensor:
    """A view of a few numbers from all over the tensor; of one that does not lie in a row, from its diagonal."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
    step = max(1, min(tensor.shape) // SAMPLES)
    count = min(SAMPLES, -(-min(tensor.shape) // step))
    return tensor.as_strided((count,), (step * sum(tensor.stride()),))
