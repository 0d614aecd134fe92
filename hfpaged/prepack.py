"""Linear layers of a model in inference on a CPU, their weights reordered once for oneDNN.

Decode steps multiply by every weight for a handful of rows, at which F.linear is poor on CPUs. oneDNN's own order
takes the place of each weight, one layer after the other, so that a model never lies in memory twice.

The numbers are those of F.linear up to the rounding of sums; blocks of the prefix cache may therefore be shared between
packed and plain weights, as they are between batches of different sizes.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hfpaged.compat import transformers_model
from hfpaged.fingerprint import sample
from hfpaged.onednn_weight import OnednnWeight, onednn_fault, pack, reordered, unpack
from hfpaged.prepack_gain import ROWS, LinearGain, measure

logger = logging.getLogger("hfpaged")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PrepackReport:
    """What lies in oneDNN's order now.

    Attributes:
        layers: linear layers whose weights do.
        nbytes: of these weights.
        skipped: why others do not, and how many of each.
        gains: what was measured at packing.
    """

    layers: int
    nbytes: int
    skipped: dict[str, int] = field(default_factory=dict)
    gains: tuple[LinearGain, ...] = ()

    def gain(self, rows: int) -> float:
        """How many times faster the packed layers together are at so many rows, as measured; 1 where nothing is.

        Raises KeyError for rows that were not measured.
        """
        times = [(gain.layers, time) for gain in self.gains if gain.is_gain for time in gain.times if time.rows == rows]
        if not times:
            if self.layers:
                raise KeyError(rows)
            return 1.0
        return sum(count * time.plain for count, time in times) / sum(count * time.packed for count, time in times)

    def __str__(self) -> str:
        rows = sorted({time.rows for gain in self.gains if gain.is_gain for time in gain.times})
        gains = ", ".join(f"{self.gain(count):.2f}x at {count}" for count in rows) if self.layers else ""
        told = f"{self.layers} linear layers ({self.nbytes / 1e6:.0f} MB) in oneDNN's order"
        told += f", rows: {gains}" if gains else ""
        others = "; ".join(f"{count} not: {reason}" for reason, count in self.skipped.items())
        return f"{told}; {others}" if others else told


@dataclass
class _Found:
    """A weight and the linear layers that hold it."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]


_reports: weakref.WeakKeyDictionary[nn.Module, PrepackReport] = weakref.WeakKeyDictionary()


def prepack(model: nn.Module, rows: Sequence[int] = ROWS) -> PrepackReport:
    """Reorder the weights of `model`'s linear layers for oneDNN where that is measured to be faster; says what it did.

    Everything else that asks for a weight (a gradient, an optimizer, PEFT's merging, state_dict, .to()) finds the plain
    one, put back bit for bit at that moment; another call packs it again. Nothing else in the model changes.

    Args:
        rows: of the inputs that are timed. Those of a decode step, up to 32, decide.

    Raises UnsupportedModelError for what is and holds no model of transformers.
    """
    inner = transformers_model(model)
    fault = _model_fault(model, inner)
    if fault is not None:
        _reports[inner] = PrepackReport(0, 0, {fault: 1})
    else:
        _pack_all(inner, rows)
    report = prepack_report(inner)
    logger.info("prepack: %s", report)
    return report


def unprepack(model: nn.Module) -> None:
    """Put the plain weights back, bit for bit. Of a model that is not packed it is no error."""
    inner = transformers_model(model)
    _reports.pop(inner, None)
    for parameter in list(_packed(inner)):
        unpack(parameter)


def prepack_report(model: nn.Module) -> PrepackReport:
    """What of `model` is packed now."""
    inner = transformers_model(model)
    report = _reports.get(inner, PrepackReport(0, 0))
    packed = list(_packed(inner))
    lost = report.layers - sum(len(weight.owners) for weight in packed)
    skipped = report.skipped | ({"asked for as plain weights since": lost} if lost else {})
    return replace(
        report,
        layers=sum(len(weight.owners) for weight in packed),
        nbytes=sum(weight.nbytes for weight in packed),
        skipped=skipped,
    )


def is_prepacked(model: nn.Module) -> bool:
    """Whether any weight of `model` lies in oneDNN's order."""
    return next(_packed(transformers_model(model)), None) is not None


def _packed(model: nn.Module) -> Iterator[OnednnWeight]:
    return (weight for weight in model.parameters() if isinstance(weight, OnednnWeight))


def _model_fault(given: nn.Module, model: nn.Module) -> str | None:
    """Why nothing of a model can be packed."""
    if hasattr(given, "_orig_mod"):
        return "the model is compiled by torch.compile, which would cut its graph at every layer"
    if model.training:
        return "the model is in training mode; call model.eval() before"
    return onednn_fault()


def _pack_all(model: nn.Module, rows: Sequence[int]) -> None:
    skipped: Counter[str] = Counter()
    old = {(gain.shape, gain.dtype): gain for gain in prepack_report(model).gains}
    for key, group in _groups(model, skipped).items():
        try:
            old[key] = gain = measure([found.parameter for found in group], rows)
        except RuntimeError as error:
            skipped[f"oneDNN refuses {key[1]} here: {str(error).strip().splitlines()[0]}"] += len(group)
            continue
        for found in group:
            fault = _pack_one(found) if gain.is_gain else "no gain was measured"
            if fault is not None:
                skipped[fault] += len(found.owners)
    packed = sum(len(weight.owners) for weight in _packed(model))
    _reports[model] = PrepackReport(packed, 0, dict(skipped), tuple(old.values()))


def _groups(model: nn.Module, skipped: Counter[str]) -> dict[tuple[Any, torch.dtype], list[_Found]]:
    """The weights that can be packed, by shape and dtype, as those of one shape are equally fast."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    groups: dict[tuple[Any, torch.dtype], list[_Found]] = {}
    for parameter, owners in holders.items():
        linears = sum(isinstance(module, nn.Linear) and name == "weight" for module, name in owners)
        fault = _fault(parameter, owners) if linears else None
        if fault is not None:
            skipped[fault] += linears
        elif linears and not isinstance(parameter, OnednnWeight):
            key = tuple(parameter.shape), parameter.dtype
            groups.setdefault(key, []).append(_Found(parameter, owners))
    return groups


def _fault(parameter: nn.Parameter, owners: list[tuple[nn.Module, str]]) -> str | None:
    """Why a weight of a linear layer must stay as it is."""
    if isinstance(parameter, OnednnWeight):
        return None
    strangers = [type(module).__name__ for module, name in owners if type(module) is not nn.Linear or name != "weight"]
    if strangers:
        is_other = any(not isinstance(module, nn.Linear) for module, _ in owners)
        return (
            f"tied to {strangers[0]}, which reads it plain" if is_other else f"{strangers[0]} multiplies in its own way"
        )
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"the weight is a {type(parameter.data).__name__}"
    if parameter.device.type != "cpu":
        return f"the weight is on {parameter.device.type}"
    if parameter.dtype not in DTYPES:
        return f"{parameter.dtype}"
    if parameter.grad is not None:
        return "the weight has a gradient"
    return None if _owns_its_memory(parameter) else "the memory of the weight belongs to other tensors, too"


def _owns_its_memory(tensor: Tensor) -> bool:
    """Whether nobody else could write into the memory of a tensor, nor would keep it."""
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    return count(tensor.untyped_storage()._cdata) <= count(torch.empty(1).untyped_storage()._cdata)


def _pack_one(found: _Found) -> str | None:
    """Reorder one weight; why not, where not."""
    plain = found.parameter.detach()
    packed = reordered(plain)
    if not torch.equal(_bits(packed.to_dense()), _bits(plain)):
        return "oneDNN does not give back its bits"
    numbers = sample(plain).clone()
    del plain
    try:
        pack(found.parameter, packed, numbers, found.owners)
    except RuntimeError:
        return "a weak reference, or C++, holds the weight"
    return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
