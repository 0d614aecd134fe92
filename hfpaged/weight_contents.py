"""What is in the weights of a model, as one number: all of it is read once, and what has changed since then again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hfpaged.onednn_weight import OnednnWeight, plain_of

# 64-bit words that are summed up to one, and how many such rows are looked at in one go, on CPUs and on other devices.
_ROW = 2**12
_ROWS, _ROWS_ON_DEVICE = 2**6, 2**11


class _Mark(NamedTuple):
    """While it is the same a tensor holds the same numbers, unless they were written behind autograd's back (`.data`):
    torch counts all other changes in place.
    """

    address: int
    version: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightContents:
    """Of the tensors of one model, each read anew only when it has changed: reading all of a model takes two or three
    times as long as a forward of one token, which reads them too.
    """

    def __init__(self) -> None:
        self._seen: tuple[Many[int], Many[int]] | None = None  # addresses and versions, of which `_digest` is
        self._known: dict[_Mark, bytes] = {}
        self._digest = b""

    def digest(self, tensors: Many[Tensor], addresses: Many[int]) -> bytes:
        """The same for equal numbers in every process, on whatever devices they lie. `addresses`: of the tensors, or
        other numbers that tell where each comes from.
        """
        seen = addresses, [_version(tensor) for tensor in tensors]
        if seen != self._seen:  # asked in the middle of a generation: marks are made only then
            self._read(tensors, *seen)
            self._seen = seen  # last: another thread may be here, or Ctrl-C come
        return self._digest

    def _read(self, tensors: Many[Tensor], addresses: Many[int], versions: Many[int]) -> None:
        known: dict[_Mark, bytes] = {}
        parts = []
        for tensor, address, version in zip(tensors, addresses, versions, strict=True):
            mark = _Mark(address, version, tuple(tensor.shape), tensor.dtype)
            known[mark] = known.get(mark) or self._known.get(mark) or _contents(tensor)
            parts.append(known[mark])
        self._digest = hashlib.sha256(b"".join(parts)).digest()
        self._known = known


def plain_parts(tensor: Tensor, of_packed: Callable[[OnednnWeight], Tensor]) -> Iterator[Tensor]:
    """The plain tensors that a tensor, or the subclass of a quantization library, is made of; of one that is spread
    over processes the part that is here.

    A weight in oneDNN's order counts as the plain one, of which `of_packed` gives what is wanted: its results differ by
    rounding only, as those of batches of different sizes do.
    """
    if type(tensor) is OnednnWeight:
        yield of_packed(tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(inner, Tensor):  # a part of a weight that is spread over processes names its mesh, too
                yield from plain_parts(inner, of_packed)
    else:
        plain = tensor.detach()
        yield plain if type(plain) is Tensor else plain.as_subclass(Tensor)


def _version(tensor: Tensor) -> int:
    """How often it was changed in place. Where torch counts nothing (inference mode) it counts as never changed."""
    return 0 if type(tensor) is OnednnWeight or tensor.is_inference() else tensor._version


def _contents(tensor: Tensor) -> bytes:
    digest = hashlib.sha256()
    for part in plain_parts(tensor, plain_of):
        if not part.is_meta:
            digest.update(f"{tuple(part.shape)} {part.dtype} ".encode())
            for raw in _checksums(part):
                digest.update(raw.cpu().numpy().tobytes())
    return digest.digest()


def _checksums(part: Tensor) -> Iterator[Tensor]:
    """A sum over each row of words, each word mixed and times an odd number that belongs to its place, then the bytes
    that fill no row. A device does it at the speed of its memory, and no other number changes the sum alone.
    """
    with torch.no_grad():
        flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        rest = flat.numel() % (8 * _ROW)
        words = flat[: flat.numel() - rest].view(torch.int64).view(-1, _ROW)
        for rows in words.split(_ROWS if words.device.type == "cpu" else _ROWS_ON_DEVICE):
            mixed = rows >> 32
            mixed ^= rows  # else two changes of highest bits, the signs of every other number, would cancel each other
            mixed *= _factors(rows.device)
            yield mixed.sum(1)
        yield flat[flat.numel() - rest :]


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """[_ROW] odd numbers without a pattern, always the same."""
    with torch.inference_mode(False):
        numbers = torch.arange(1, _ROW + 1, dtype=torch.int64) * -7046029254386353131
        numbers ^= numbers >> 29
        numbers *= -4658895280553007687
        return (numbers | 1).to(device)
