"""The KV formats again, as bytes alone: what `hfpaged.kv_format` and `hfpaged_kernels.encoding` say, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_names import known_name

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """How keys or values lie: `dtype` for plain numbers (None: as the model computes them), else codes of `bits`, with
    a scale (and where `has_low` a lowest value) for each "token", or for each `group` of its numbers, each "channel" of
    a block, or each "head" (these lie elsewhere).
    """

    dtype: str | None = None
    bits: int = 0
    scales: Literal["token", "channel", "head"] = "token"
    has_low: bool = False
    group: int | None = None

    def head_bytes(self, block_size: int, dim: int, computed: str) -> int:
        """Bytes of one head of one block, scales included."""
        if not self.bits:
            return block_size * dim * dtype_bytes(self.dtype or computed)
        codes = block_size * (dim * self.bits // 8)
        groups = dim // self.group if self.group and dim % self.group == 0 else 1
        scales = {
            "token": 2 * block_size * (2 * groups if self.has_low else 1),
            "channel": 2 * dim + 8,
            "head": 0,
        }
        return codes + codes % 2 + scales[self.scales]


@dataclass(frozen=True)
class PlanFormat:
    """A KV format. One with a part of less than eight bits keeps the unfilled block of each sequence as computed."""

    name: str
    key: Part
    value: Part

    @property
    def has_residuals(self) -> bool:
        return any(0 < part.bits < 8 for part in (self.key, self.value))

    def block_bytes(self, heads: int, key_dim: int, value_dim: int, block_size: int, computed: str) -> int:
        """Bytes of one block of one layer."""
        key = self.key.head_bytes(block_size, key_dim, computed)
        return heads * (key + self.value.head_bytes(block_size, value_dim, computed))

    def residual_bytes(self, heads: int, key_dim: int, value_dim: int, block_size: int, computed: str) -> int:
        """Bytes that one layer keeps of an unfilled block as computed."""
        if not self.has_residuals:
            return 0
        dims = (key_dim if self.key.bits else 0) + (value_dim if self.value.bits else 0)
        return heads * block_size * dims * dtype_bytes(computed)


_NATIVE = {"auto": Part()} | {name: Part(name) for name in ("float32", "bfloat16", "float16")}
_EIGHT_BITS = {name: Part(bits=8) for name in ("int8", "fp8_e4m3", "fp8_e5m2")}
_INT4 = Part(bits=4, has_low=True)
_INT4_GROUPS = Part(bits=4, has_low=True, group=32)
_INT4_CHANNEL = Part(bits=4, scales="channel", has_low=True)
_KEYS = _NATIVE | _EIGHT_BITS | {"int4": _INT4_CHANNEL}
_VALUES = _NATIVE | _EIGHT_BITS | {"int4": _INT4_GROUPS}

FORMATS = {
    **{name: PlanFormat(name, part, part) for name, part in (_NATIVE | _EIGHT_BITS).items()},
    "k8v4": PlanFormat("k8v4", Part(bits=8), _INT4_GROUPS),
    "int4": PlanFormat("int4", _INT4_CHANNEL, _INT4),
}


def plan_format(kv_format: str) -> PlanFormat:
    """The record for what users write: a name, or "int8/auto" for keys and values apart. Raises InvalidConfigError."""
    name, parts = known_name(kv_format, FORMATS, _KEYS, _VALUES)
    return FORMATS[name] if parts is None else PlanFormat(name, _KEYS[parts[0]], _VALUES[parts[1]])


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number. Raises InvalidConfigError for a dtype that is not known."""
    size = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if size is None:
        raise InvalidConfigError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
    return size


def check_dims(kv_format: PlanFormat, key_dim: int, value_dim: int) -> None:
    """Raises InvalidConfigError for a format that cannot store rows of such dims."""
    for what, part, dim in (("keys", kv_format.key, key_dim), ("values", kv_format.value, value_dim)):
        if part.bits and dim * part.bits % 8:
            raise InvalidConfigError(
                f"kv_dtype={kv_format.name!r} packs {8 // part.bits} numbers into a byte, and {what} of this model "
                f"have head dim {dim}, which is odd; use {', '.join(_EIGHT_BITS)} or auto"
            )
