"""Why weights must stay as they are: each reason as it is told."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hfpaged.onednn_weight import OnednnWeight, onednn_fault

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Owners = list[tuple[nn.Module, str]]  # modules that hold a parameter, under these names


def model_fault(given: nn.Module, model: nn.Module) -> str | None:
    """Why nothing of a model can be packed."""
    if hasattr(given, "_orig_mod"):
        return "the model is compiled by torch.compile, which would cut its graph at every layer"
    if model.training:
        return "the model is in training mode; call model.eval() before"
    return onednn_fault()


def weight_fault(parameter: nn.Parameter, owners: Owners) -> str | None:
    """Why a weight of a linear layer must stay as it is."""
    if isinstance(parameter, OnednnWeight):
        return None
    for module, name in owners:
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            return f"{type(module).__name__} is not nn.Linear itself and multiplies in its own way"
        if name != "weight":
            return f"it is also the {name} of a {type(module).__name__}"
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"the weight is a {type(parameter.data).__name__}, not a plain tensor"
    if parameter.device.type != "cpu":
        return f"the weight is on {parameter.device.type}"
    if parameter.dtype not in DTYPES:
        return f"the weight is of {parameter.dtype}"
    if parameter.grad is not None:
        return "the weight has a gradient"
    return None if _owns_its_memory(parameter) else "the memory of the weight belongs to other tensors, too"


def _owns_its_memory(tensor: Tensor) -> bool:
    """Whether nobody else could write into the memory of a tensor, nor would keep it."""
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    return _holders(tensor) <= _holders(torch.empty(1))


def _holders(tensor: Tensor) -> int:
    """How many tensors lie on this memory, and one more; 0 where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return count(storage._cdata) if count is not None else 0
