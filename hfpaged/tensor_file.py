"""One safetensors file under a SHA-256 of all its bytes, written a tensor at a time and complete or not there at all.

The library's own writer wants all tensors in memory at once, a second copy of a whole pool; its reader is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from hfpaged.errors import HfpagedError, PrefixFileError

# The header begins with the digest, which is taken with zeros in its own place:
#
#     length (8 bytes)  {"__metadata__": {"sha256": "0000 ... 0000", "manifest": "..."}, "name": {...}, ...}  tensors
_OPENING = b'{"__metadata__": {"sha256": "'
_ZEROS = b"0" * 64
_LENGTH = struct.Struct("<Q")
_BEGINNING = _LENGTH.size + len(_OPENING) + len(_ZEROS)
_CHUNK = 2**20
# Names of what is being written. A process that is killed leaves such a file behind.
TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".hfpaged-", ".tmp"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class FileKind(NamedTuple):
    """What a file holds, what to do about a bad one, and the error that says so."""

    content: str
    remedy: str
    error: type[HfpagedError]


PREFIXES = FileKind("saved prefixes", "save the prefixes again", PrefixFileError)


class TensorSpec(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def spec_of(reader: Any, name: str) -> TensorSpec | None:
    """What an open file has under `name`, None for nothing or a dtype that is not ours."""
    found = reader.get_slice(name) if name in reader.keys() else None  # noqa: SIM118
    dtype = next((ours for ours, theirs in _DTYPES.items() if found and theirs == found.get_dtype()), None)
    return None if found is None or dtype is None else TensorSpec(name, dtype, tuple(found.get_shape()))


def write_file(
    path: str | os.PathLike[str], manifest: str, specs: Many[TensorSpec], tensors: Iterable[Tensor], *,
    durable: bool = True,
) -> int:  # fmt: skip
    """Write `tensors`, which come in the order of `specs`, and put the file in its place when all of it is on disk.
    Returns its bytes. Raises OSError; what was under that name before is still there then.

    Not `durable`: nothing is awaited, so that a crash of the machine (no other one) may leave a file that is not whole,
    which its reader will see.
    """
    folder = Path(path).parent
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=TEMPORARY_PREFIX, suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(handle, "wb", buffering=_CHUNK) as file:
            _write(file, _header(manifest, specs), specs, tensors)
            size = file.seek(0, os.SEEK_END)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        _sync_folder(folder)
    return size


def parse_file(raw: bytes, path: str | os.PathLike[str], kind: FileKind = PREFIXES) -> tuple[str, dict[str, Tensor]]:
    """The manifest and the tensors in the bytes of a file, every one of them checked. For files that others may remove
    or cut meanwhile: nothing of them is read later. Raises the error of its kind.
    """
    _compare_digest(raw[:_BEGINNING], [memoryview(raw)[_BEGINNING:]], path, kind)
    try:
        metadata = json.loads(raw[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(raw)[0]])["__metadata__"]
        return str(metadata["manifest"]), load(raw)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise kind.error(f"{_named(path)} is no safetensors file: {error}; {kind.remedy}") from error


@contextmanager
def open_file(path: str | os.PathLike[str], kind: FileKind = PREFIXES) -> Iterator[Any]:
    """The reader of safetensors over a file whose every byte was checked. Raises the error of its kind, OSError."""
    with open(path, "rb") as file:
        _check_digest(file, path, kind)
        try:
            reader = safe_open(os.fspath(path), framework="pt")
        except SafetensorError as error:
            raise kind.error(f"{_named(path)} is no safetensors file: {error}; {kind.remedy}") from error
        with reader as tensors:
            # The reader opened it by its name, which another process may have given to a newer file meanwhile.
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                raise kind.error(f"{_named(path)} was replaced while it was read; load it again")
            yield tensors


def _header(manifest: str, specs: Many[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"sha256": _ZEROS.decode(), "manifest": manifest}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        entries[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    return header + b" " * (-len(header) % 8)  # tensors begin at a multiple of 8


def _write(file: BinaryIO, header: bytes, specs: Many[TensorSpec], tensors: Iterable[Tensor]) -> None:
    digest = hashlib.sha256()
    for part in (_LENGTH.pack(len(header)), header):
        digest.update(part)
        file.write(part)
    for spec, tensor in zip(specs, tensors, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), spec.name
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
        digest.update(raw)
        file.write(raw)
    file.seek(_LENGTH.size + len(_OPENING))
    file.write(digest.hexdigest().encode())


def _check_digest(file: BinaryIO, path: str | os.PathLike[str], kind: FileKind) -> None:
    """Raises the error of `kind` unless the file is byte for byte what was written."""
    beginning = file.read(_BEGINNING)
    _compare_digest(beginning, iter(lambda: file.read(_CHUNK), b""), path, kind)


def _compare_digest(
    beginning: bytes, rest: Iterable[bytes | memoryview], path: str | os.PathLike[str], kind: FileKind
) -> None:  # fmt: skip
    opening, written = beginning[: -len(_ZEROS)], beginning[-len(_ZEROS) :]
    if len(beginning) < _BEGINNING or not opening.endswith(_OPENING):
        raise kind.error(
            f"{_named(path)} does not begin like a file of {kind.content} ({len(beginning)} bytes read): it was "
            f"changed, truncated, or written by something else; {kind.remedy}"
        )
    digest, size = hashlib.sha256(opening + _ZEROS), len(beginning)
    for chunk in rest:
        digest.update(chunk)
        size += len(chunk)
    if digest.hexdigest().encode() != written:
        raise kind.error(
            f"{_named(path)} is {size} bytes with SHA-256 {digest.hexdigest()[:12]}..., and was written with "
            f"{written[:12].decode(errors='replace')}...: it was truncated or changed, so none of it can be trusted; "
            f"{kind.remedy}"
        )


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a crash of the machine, where a folder can be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _named(path: str | os.PathLike[str]) -> str:
    return repr(os.fspath(path))
