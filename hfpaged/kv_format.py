"""KV formats: how keys and values lie in memory, as records."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfpaged.errors import InvalidConfigError


@dataclass(frozen=True)
class KVFormat:
    """`dtype` is what is stored; None stores what the model computes. Quantized formats will add their scales."""

    name: str
    dtype: torch.dtype | None

    def storage_dtype(self, computed: torch.dtype) -> torch.dtype:
        """The dtype in the pool for keys or values that the model computes as `computed`."""
        return self.dtype or computed


FORMATS = {
    fmt.name: fmt
    for fmt in (
        KVFormat("auto", None),
        KVFormat("float32", torch.float32),
        KVFormat("bfloat16", torch.bfloat16),
        KVFormat("float16", torch.float16),
    )
}


def resolve_format(kv_dtype: str | torch.dtype | KVFormat) -> KVFormat:
    """The record for a name or a torch dtype. Raises InvalidConfigError with the names that exist."""
    if isinstance(kv_dtype, KVFormat):
        return kv_dtype
    name = str(kv_dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise InvalidConfigError(f"kv_dtype={name!r} is not known; use one of {', '.join(FORMATS)}")
    return FORMATS[name]
