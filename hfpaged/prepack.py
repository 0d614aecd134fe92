"""Linear layers of a model in inference on a CPU, their weights reordered once for oneDNN.

A decode step multiplies every weight by a handful of rows, at which F.linear of float32 is poor on many CPUs, and that
of bfloat16 reorders the weight each time. The new order takes the place of each weight, one layer after the other, so
that a model never lies in memory twice.

The numbers are those of F.linear up to the rounding of sums. So blocks of the prefix cache may be shared between packed
and plain weights, as they are between batches of different sizes, whose sums are rounded differently too.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hfpaged.compat import transformers_model
from hfpaged.fingerprint import sample
from hfpaged.onednn_weight import OnednnWeight, pack, reordered, unpack
from hfpaged.prepack_faults import Owners, model_fault, weight_fault
from hfpaged.prepack_gain import ROWS, LinearGain, measure
from hfpaged.prepack_report import PrepackReport

logger = logging.getLogger("hfpaged")
_reports: weakref.WeakKeyDictionary[nn.Module, PrepackReport] = weakref.WeakKeyDictionary()


def prepack(model: nn.Module, rows: Sequence[int] = ROWS, copied_share: float = 0.25) -> PrepackReport:
    """Reorder the weights of `model`'s linear layers for oneDNN where that is measured to be faster; says what it did.

    Everything else that asks for a weight (a gradient, an optimizer, PEFT's merging, state_dict, .to()) finds the plain
    one, put back bit for bit at that moment; another call packs it again. Nothing else in the model changes.

    Args:
        rows: of the decode steps to come, as many as they have sequences. The sum of their times decides, and none of
            them may become much slower: where single rows are rare, `prepack_gain.BATCH_ROWS` packs more.
        copied_share: a head that is tied to the embedding is packed beside it, for an embedding needs plain rows,
            as long as such copies stay under this share of the model's bytes.

    Raises UnsupportedModelError for what is and holds no model of transformers.
    """
    inner = transformers_model(model)
    fault = model_fault(model, inner)
    if fault is not None:
        _reports[inner] = PrepackReport(skipped={fault: sum(isinstance(part, nn.Linear) for part in inner.modules())})
    else:
        _reports[inner] = _pack_all(inner, rows, copied_share)
    report = prepack_report(inner)
    logger.info("prepack: %s", report)
    return report


def unprepack(model: nn.Module) -> None:
    """Put the plain weights back, bit for bit. Of a model that is not packed it is no error."""
    inner = transformers_model(model)
    _reports.pop(inner, None)
    for weight in list(_packed(inner)):
        unpack(weight)


def prepack_report(model: nn.Module) -> PrepackReport:
    """What of `model` is packed now."""
    inner = transformers_model(model)
    report, packed = _reports.get(inner, PrepackReport()), list(_packed(inner))
    now = replace(
        report,
        layers=_num_layers(packed),
        nbytes=sum(weight.nbytes for weight in packed),
        copied_nbytes=sum(weight.nbytes for weight in packed if weight.plain is not None),
    )
    lost = report.layers - now.layers
    return now if lost <= 0 else replace(now, skipped={**report.skipped, "something asked for the plain weight": lost})


def is_prepacked(model: nn.Module) -> bool:
    """Whether any weight of `model` lies in oneDNN's order."""
    return next(_packed(transformers_model(model)), None) is not None


def _packed(model: nn.Module) -> Iterator[OnednnWeight]:
    return (weight for weight in model.parameters() if isinstance(weight, OnednnWeight))


def _num_layers(packed: Sequence[OnednnWeight]) -> int:
    return sum(isinstance(module(), nn.Linear) for weight in packed for module, _ in weight.owners)


@dataclass(frozen=True)
class _Found:
    """A weight and the modules that hold it."""

    parameter: nn.Parameter
    owners: Owners

    @property
    def num_linears(self) -> int:
        return sum(isinstance(module, nn.Linear) and name == "weight" for module, name in self.owners)

    @property
    def is_tied(self) -> bool:
        """Whether an embedding reads its rows, so that the plain weight must stay beside the packed one."""
        return self.num_linears < len(self.owners)


def _pack_all(model: nn.Module, rows: Sequence[int], copied_share: float) -> PrepackReport:
    skipped: Counter[str] = Counter()
    gains = {(gain.shape, gain.dtype, gain.is_tied): gain for gain in prepack_report(model).gains}
    spare = copied_share * sum(parameter.nbytes for parameter in model.parameters())
    for key, group in _groups(model, spare, skipped).items():
        try:
            gain = measure([found.parameter for found in group], rows, group[0].is_tied)
        except RuntimeError as error:
            refusal = f"oneDNN refuses {group[0].parameter.dtype} here: {str(error).strip().splitlines()[0]}"
            skipped[refusal] += sum(found.num_linears for found in group)
            continue
        for found in group:
            fault = _pack_one(found, gain) if gain.is_gain else "no gain was measured"
            if fault is not None:
                skipped[fault] += found.num_linears
            else:
                gain = replace(gain, layers=gain.layers + found.num_linears)
        gains[key] = gain
    return PrepackReport(_num_layers(list(_packed(model))), skipped=dict(skipped), gains=tuple(gains.values()))


_Kind = tuple[tuple[int, int], torch.dtype, bool]


def _groups(model: nn.Module, spare: float, skipped: Counter[str]) -> dict[_Kind, list[_Found]]:
    """The weights that can be packed; those of one shape and dtype are equally fast and come together."""
    holders: dict[nn.Parameter, Owners] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    groups: dict[_Kind, list[_Found]] = {}
    for found in itertools.starmap(_Found, holders.items()):
        if not found.num_linears or isinstance(found.parameter, OnednnWeight):
            continue
        fault = weight_fault(found.parameter, found.owners)
        if fault is None and found.is_tied:
            spare -= found.parameter.nbytes
            fault = _copy_fault(found.parameter) if spare < 0 else None
        if fault is not None:
            skipped[fault] += found.num_linears
        else:
            out, width = found.parameter.shape
            groups.setdefault(((out, width), found.parameter.dtype, found.is_tied), []).append(found)
    return groups


def _copy_fault(parameter: nn.Parameter) -> str:
    return f"tied to an embedding, and a copy of {parameter.nbytes / 1e6:.0f} MB is more than copied_share allows"


def _pack_one(found: _Found, gain: LinearGain) -> str | None:
    """Reorder one weight; why not, where not."""
    plain = found.parameter.detach()
    packed = reordered(plain)
    if not torch.equal(_bits(packed.to_dense()), _bits(plain)):
        return "oneDNN does not give back its bits"
    numbers = sample(plain).clone()
    del plain
    try:
        pack(found.parameter, packed, numbers, found.owners, (gain.min_rows or 0) if found.is_tied else 0)
    except RuntimeError:
        return "a weak reference, or C++, holds the weight"
    return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
