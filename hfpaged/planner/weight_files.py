"""The weights beside a config: what the headers of safetensors files say of each tensor. No weight is read.

A file of safetensors begins with 8 bytes, the length of a JSON text that names the dtype, shape and place of each
tensor (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpaged.planner.weight_precision import HEADER_BITS

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000  # as safetensors itself allows


class UnreadableWeightsError(Exception):
    """The file and what is wrong with it. Never a user's: the caller counts from the config and says so."""


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str  # as in the header: F32, BF16, F8_E4M3, I32 ...
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.numel * HEADER_BITS[self.dtype] // 8)


@dataclass(frozen=True)
class Stored:
    """What lies in a folder: each tensor where headers tell, the bytes alone where none do."""

    files: str
    bytes: int
    tensors: tuple[Tensor, ...] = ()


def stored_in(folder: str | Path | None) -> Stored | None:
    """The weights in `folder`, None where there are none. Of files without an index (as some tools write them) all
    count. Raises UnreadableWeightsError for a damaged one.
    """
    if folder is None or not (where := Path(folder)).is_dir():
        return None
    if (where / INDEX).is_file():
        return _sharded(where / INDEX)
    parts = [where / ONE] if (where / ONE).is_file() else _loose(where)
    return _read(parts) if parts else _pickled(where)


def _loose(where: Path) -> list[Path]:
    """Shards without an index; not Mistral's second copy of the same weights, and no adapter."""
    return sorted(
        path for path in where.glob("*.safetensors") if not path.name.startswith(("consolidated", "adapter_"))
    )


def _sharded(index: Path) -> Stored:
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(said["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise UnreadableWeightsError(f"{index.name} is damaged ({error})") from error
    parts = [index.parent / name for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    total = (said.get("metadata") or {}).get("total_size")
    if missing and isinstance(total, (int, float)):
        return Stored(f"{INDEX} ({len(missing)} of its {len(parts)} files are not there)", int(total))
    return _read(parts)


def _read(parts: list[Path]) -> Stored:
    tensors = tuple(tensor for part in parts for tensor in _header(part))
    what = parts[0].name if len(parts) == 1 else f"{len(parts)} safetensors files"
    return Stored(what, sum(tensor.bytes for tensor in tensors), tensors)


def _header(path: Path) -> list[Tensor]:
    """The tensors of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise UnreadableWeightsError(f"{path.name} is damaged (a header of {length} bytes in {size})")
            entries = json.loads(file.read(length))
            return _tensors(path, entries, size - 8 - length)
    except OSError as error:
        raise UnreadableWeightsError(f"{path.name} cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableWeightsError(f"{path.name} is damaged (its header: {error!r})") from error


def _tensors(path: Path, entries: dict[str, Any], payload: int) -> list[Tensor]:
    tensors, end = [], 0
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        tensor = Tensor(name, entry["dtype"], tuple(map(int, entry["shape"])))
        start, stop = entry["data_offsets"]
        if tensor.dtype not in HEADER_BITS or stop - start != tensor.bytes:
            raise UnreadableWeightsError(f"{path.name} is damaged ({name}: {entry})")
        tensors.append(tensor)
        end = max(end, stop)
    if end != payload:
        raise UnreadableWeightsError(f"{path.name} is damaged ({payload} bytes of weights, its header says {end})")
    return tensors


def _pickled(where: Path) -> Stored | None:
    """Files of torch.save by their size alone: they are never opened, since reading a pickle runs what is in it."""
    parts = sorted(where.glob("pytorch_model*.bin"))
    if not parts:
        return None
    what = parts[0].name if len(parts) == 1 else f"{len(parts)} pytorch_model files"
    return Stored(what, sum(part.stat().st_size for part in parts))
