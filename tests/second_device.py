"""A second device for machines that have one: "second:0", made in Python, that keeps its numbers in CPU memory.

It is as strict as a real one: an operation on tensors of two devices is an error, only copies cross. `crossings` lists
those copies. Importing this registers the device for the whole process, so only workers do it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "second"


class Crossing(NamedTuple):
    """A copy from one device to the other."""

    to_second: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


crossings: list[Crossing] = []


class Far(Tensor):
    """A tensor on the second device, around the one that holds its numbers."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        far = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        far.near = near
        return far

    def tolist(self) -> Any:
        crossings.append(Crossing(False, tuple(self.shape), self.dtype))
        return self.near.tolist()

    def __repr__(self, **kwargs: Any) -> str:
        return f"Far({self.near})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation in which the second device takes part."""
    name, source = func._schema.name, (args[1] if func._schema.name == "aten::copy_" else args[0] if args else None)
    if name in ("aten::copy_", "aten::_to_copy"):
        is_far = isinstance(args[0], Far) if name == "aten::copy_" else is_second(kwargs.get("device"), source)
        if is_far != isinstance(source, Far):
            crossings.append(Crossing(is_far, tuple(source.shape), source.dtype))
        made = func(*near(args), **near(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
        return args[0] if name == "aten::copy_" else Far(made) if is_far else made
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(isinstance(t, Far) for t in tensors) and not all(isinstance(t, Far) or t.ndim == 0 for t in tensors):
        raise RuntimeError(f"{name}: tensors on two devices: {[(type(t).__name__, tuple(t.shape)) for t in tensors]}")
    is_far = is_second(kwargs.get("device"), next((t for t in tensors if isinstance(t, Far)), None))
    made = func(*near(args), **near(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
    if not is_far:
        return made
    known = {id(t.near): t for t in tensors if isinstance(t, Far)}  # an operation in place gives its tensor back
    return tree_map(lambda leaf: known.get(id(leaf), Far(leaf)) if isinstance(leaf, Tensor) else leaf, made)


def is_second(device: Any, otherwise: Tensor | None) -> bool:
    return isinstance(otherwise, Far) if device is None else torch.device(device).type == NAME


def near(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.near if isinstance(leaf, Far) else leaf, tree)


def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor() builds its numbers on the device that it is given, which Python cannot do."""
    made = _tensor(data, *args, **kwargs)
    return made if device is None else made.to(device)


backend_registration._setup_privateuseone_for_python_backend(NAME)
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
_tensor, torch.tensor = torch.tensor, tensor
