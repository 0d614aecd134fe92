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

SAMPLES = 8  # numbers of each tensor
# What a config says about its origin and about how the same numbers are computed.
_IGNORED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "use_cache"}


@dataclass
class _Known:
    """What need not be made again while a model has the same tensors: views of their samples see new numbers."""

    addresses: list[int]
    shapes: bytes
    samples: list[Tensor]


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def model_fingerprint(model: nn.Module, config: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256, the same in every process that loads the same weights in the same dtypes."""
    tensors = [*model.parameters(), *model.buffers()]
    addresses = [_address(tensor) for tensor in tensors]
    known = _known.get(model)
    if known is None or known.addresses != addresses:
        known = _known[model] = _look_at(model, addresses)
    digest = hashlib.sha256(json.dumps(_without_origin(config), sort_keys=True, default=str).encode())
    digest.update(known.shapes)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for sample in known.samples:
        alike.setdefault((sample.device, sample.dtype), []).append(sample)
    for parts in alike.values():
        digest.update(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _look_at(model: nn.Module, addresses: list[int]) -> _Known:
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)
    plain = [part for _, tensor in named for part in _plain(tensor)]
    samples = [_sample(part) for part in plain if part.device.type != "meta" and part.numel()]
    return _Known(addresses, shapes.encode(), samples)


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
    """A view of a few numbers from all over the tensor."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
