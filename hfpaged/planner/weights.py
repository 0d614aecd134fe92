"""What a model's weights take in memory: by the headers of the files beside its config, else counted from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from hfpaged.errors import InvalidConfigError
from hfpaged.planner import weight_precision as precision
from hfpaged.planner.compared_families import told
from hfpaged.planner.model_facts import ModelFacts
from hfpaged.planner.parameters import Parameters, count
from hfpaged.planner.rank_weights import Shards, on_one_rank
from hfpaged.planner.weight_files import Stored, Tensor, UnreadableWeightsError, stored_in
from hfpaged.planner.weight_precision import WIDE_FLOATS, Quantization

# Two dimensions and one of these in its name: no matrix that is multiplied with, so that no quantization touches it.
NO_MATRIX = ("embed", "lm_head", "wte", "wpe", "norm", "conv", "router")


@dataclass(frozen=True)
class Weights:
    """`bytes` in memory, `parameters` where they are known, and `source`: how both were found, for people."""

    bytes: int
    parameters: int | None
    source: str


def weight_bytes(
    facts: ModelFacts, dtype: str | None = None, quantization: str | None = None, tp: int = 1
) -> Weights:  # fmt: skip
    """The weights of all parts of the model, towers for pictures too where files tell of them, on one of `tp` ranks.

    `dtype`: in place of the one that the weights are stored in; what is quantized already stays as it is.
    `quantization`: int8, fp8 or int4, of the matrices in the layers of a model that is not quantized.
    Raises InvalidConfigError for a dtype or quantization that is unknown, or a second quantization.
    """
    asked = _asked(facts, quantization)
    bits = precision.float_bits(dtype) if dtype else None
    try:
        stored = stored_in(_folder(facts))
    except UnreadableWeightsError as error:
        return _counted(facts, dtype, asked, tp, f"; {error}")
    if stored is None:
        return _counted(facts, dtype, asked, tp, "")
    if stored.tensors:
        return _by_headers(facts, stored, bits, asked, tp)
    return _by_size(facts, stored, dtype, asked, tp)


def given_bytes(facts: ModelFacts, whole: int, tp: int) -> int:
    """Of one rank, where `whole` is known for the model."""
    return whole if tp == 1 else math.ceil(whole * _share(facts, tp))


def _folder(facts: ModelFacts) -> str | None:
    """Where the weights of this config lie: beside one of any other name, those of another model may."""
    named = Path(facts.name).name
    return None if named.endswith(".json") and named != "config.json" else facts.folder


def _asked(facts: ModelFacts, name: str | None) -> Quantization | None:
    if name is None:
        return None
    own = _quantization(facts)
    if own is not None:
        raise InvalidConfigError(
            f"quantization={name!r} asks to quantize weights that are quantized already ({own.name}); leave it out"
        )
    return precision.asked_for(name)


def _quantization(facts: ModelFacts) -> Quantization | None:
    return precision.of_config(facts.whole) or precision.of_config(facts.config)


def _by_headers(
    facts: ModelFacts, stored: Stored, bits: int | None, asked: Quantization | None, tp: int
) -> Weights:  # fmt: skip
    shards = Shards(facts, frozenset(tensor.name for tensor in stored.tensors), tp)
    here = (replace(tensor, shape=(shards.numel(tensor.name, tensor.shape),)) for tensor in stored.tensors)
    total = sum(_tensor_bytes(*pair, bits, asked) for pair in zip(here, stored.tensors, strict=True))
    return Weights(total, _stored_parameters(facts, stored), f"headers of {stored.files}{_suffix(asked)}")


def _tensor_bytes(tensor: Tensor, whole: Tensor, bits: int | None, asked: Quantization | None) -> int:
    """Of `tensor`, the part of `whole` that is on a rank."""
    if tensor.dtype not in WIDE_FLOATS:
        return tensor.bytes
    if asked and len(whole.shape) > 1 and not any(part in tensor.name for part in NO_MATRIX):
        return math.ceil(tensor.numel * asked.bits / 8)
    return tensor.numel * bits // 8 if bits else tensor.bytes


def _stored_parameters(facts: ModelFacts, stored: Stored) -> int:
    """Several weights of a quantized model lie in one number: those are counted from the config."""
    if _quantization(facts) is not None:
        return count(facts).total
    return sum(tensor.numel for tensor in stored.tensors)


def _by_size(
    facts: ModelFacts, stored: Stored, dtype: str | None, asked: Quantization | None, tp: int
) -> Weights:  # fmt: skip
    """Files that tell their size alone, of numbers in the config's dtype."""
    if asked is not None:
        return _counted(facts, dtype, asked, tp, f"; of {stored.files} only the size is known")
    own = _quantization(facts)
    scale = precision.float_bits(dtype) / precision.float_bits(facts.dtype) if dtype and own is None else 1
    parameters = count(facts).total if own else stored.bytes * 8 // precision.float_bits(facts.dtype)
    return Weights(given_bytes(facts, math.ceil(stored.bytes * scale), tp), parameters, f"size of {stored.files}")


def _share(facts: ModelFacts, tp: int) -> float:
    """Of all weights, what one rank has."""
    parameters = count(facts)
    return on_one_rank(facts, parameters, tp).total / max(parameters.total, 1)


def _counted(facts: ModelFacts, dtype: str | None, asked: Quantization | None, tp: int, why: str) -> Weights:
    quantized = asked or _quantization(facts)
    parameters = count(facts)
    total = _counted_bytes(on_one_rank(facts, parameters, tp), precision.float_bits(dtype or facts.dtype), quantized)
    return Weights(total, parameters.total, f"{told(facts.model_type)}{_suffix(quantized)}{why}")


def _counted_bytes(parameters: Parameters, bits: int, quantized: Quantization | None) -> int:
    if quantized is None:
        return parameters.total * bits // 8
    touched = parameters.experts + (0 if quantized.experts_only else parameters.linear)
    return math.ceil((touched * quantized.bits + (parameters.total - touched) * bits) / 8)


def _suffix(quantized: Quantization | None) -> str:
    return f", {quantized.name}" if quantized else ""
