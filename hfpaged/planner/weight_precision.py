"""What a weight costs by its dtype or by its quantization, scales included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfpaged.errors import InvalidConfigError

# Bits of a number by dtype: as configs and torch write them, and as safetensors headers do.
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
HEADER_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
HEADER_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}
HEADER_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
HEADER_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
WIDE_FLOATS = ("F64", "F32", "F16", "BF16")  # --dtype changes these only
SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}

# What is asked for: int8 has one scale of 32 bits for each row, fp8 the same, int4 one of 16 bits for each 32 weights.
ASKED = {"int8": 8.01, "fp8": 8.01, "int4": 4.5}


@dataclass(frozen=True)
class Quantization:
    """`bits` of one quantized weight with its share of scales and zero points. `experts_only`: where attention and
    routers keep the model's dtype, as in gpt-oss.
    """

    name: str
    bits: float
    experts_only: bool = False


def float_bits(dtype: str) -> int:
    """Raises InvalidConfigError for a dtype that no weights have."""
    name = dtype.removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in BITS:
        raise InvalidConfigError(f"dtype={dtype!r} is none that weights have; use one of {', '.join(BITS)}")
    return BITS[name]


def asked_for(name: str) -> Quantization:
    """Raises InvalidConfigError for an unknown one."""
    if name not in ASKED:
        raise InvalidConfigError(f"quantization={name!r} is unknown; use one of {', '.join(ASKED)}")
    return Quantization(name, ASKED[name])


def of_config(config: Mapping[str, Any]) -> Quantization | None:
    """What `quantization_config` says; None without one, or where it is of no kind that is known here."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    method = str(said.get("quant_method", "bitsandbytes" if "load_in_4bit" in said else "")).lower()
    rule = _METHODS.get(method)
    return rule(said) if rule else None


def _grouped(said: Mapping[str, Any]) -> Quantization:
    """GPTQ and AWQ: a scale of 16 bits and a zero point of the weights' own bits for each group of inputs."""
    bits = int(said.get("bits", said.get("w_bit", 4)))
    group = int(said.get("group_size", said.get("q_group_size", 128)))
    shared = (16 + bits) / group if group > 0 else 0.0
    return Quantization(f"{said.get('quant_method')} of {bits} bits", bits + shared)


def _bitsandbytes(said: Mapping[str, Any]) -> Quantization:
    """4 bits: a scale of 32 bits for each 64 weights, or of 8 where scales are quantized again (QLoRA, arXiv
    2305.14314, section 3: 0.127 bits); 8 bits: a scale for each row.
    """
    if not (said.get("load_in_4bit") or said.get("_load_in_4bit")):
        return Quantization("bitsandbytes of 8 bits", 8.01)
    return Quantization("bitsandbytes of 4 bits", 4.127 if said.get("bnb_4bit_use_double_quant") else 4.5)


def _fp8(said: Mapping[str, Any]) -> Quantization:
    rows, columns = said.get("weight_block_size") or (1, 4096)
    return Quantization("fp8", 8 + 32 / (rows * columns))


def _mxfp4(said: Mapping[str, Any]) -> Quantization:
    """Four bits and a scale of eight for each 32 weights (OCP Microscaling Formats, version 1.0)."""
    return Quantization("mxfp4", 4 + 8 / 32, experts_only=True)


def _compressed(said: Mapping[str, Any]) -> Quantization | None:
    """compressed-tensors: the first group's weights stand for all."""
    weights: Mapping[str, Any] = next(
        (group.get("weights") or {} for group in (said.get("config_groups") or {}).values()), {}
    )
    if not weights.get("num_bits"):
        return None
    bits, group = int(weights["num_bits"]), weights.get("group_size")
    return Quantization(f"compressed-tensors of {bits} bits", bits + (16 / group if group and group > 0 else 0.01))


_METHODS = {
    "gptq": _grouped,
    "awq": _grouped,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
