"""What a call on rank 0 gave or raised, as numbers for the other ranks.

They come over a network, which pickle alone must not trust: only outputs and errors are made of them, and no other code
is run.
"""

from __future__ import annotations

import builtins
import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from hfpaged import errors
from hfpaged.errors import HfpagedError

Ints = npt.NDArray[np.int64]
# What outputs are made of, besides plain values.
_PARTS = {
    "array": ("array", "_array_reconstructor"),
    "hfpaged.engine.outputs": (
        "PositionLogprobs", "RequestMetrics", "RequestOutput", "SequenceOutput", "TokenLogprob", "Tokens",
    ),
}  # fmt: skip


class _Pickler(pickle.Pickler):
    """Knows what the standard one does not: errors that are not made from their text alone, or are somebody else's."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, BaseException) and not _comes_back(thing):
            return HfpagedError, (f"{type(thing).__name__}: {thing}",)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes outputs and errors."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PARTS.get(module, ()) or _is_error(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of what a batcher gives back or raises")


def to_numbers(value: Any, error: BaseException | None) -> Ints:
    """One of the two, as int64 numbers: the count of bytes, and these, eight in each."""
    told = io.BytesIO()
    _Pickler(told).dump((value, error))
    content = told.getvalue()
    padded = content + bytes(-len(content) % 8)
    return np.concatenate([[len(content)], np.frombuffer(padded, dtype=np.int64)])


def from_numbers(numbers: Ints) -> Any:
    """The value; raises the error."""
    value, error = _Unpickler(io.BytesIO(numbers[1:].tobytes()[: int(numbers[0])])).load()
    if error is not None:
        raise error
    return value


def _comes_back(error: BaseException) -> bool:
    try:
        return type(_Unpickler(io.BytesIO(pickle.dumps(error))).load()) is type(error)
    except Exception:
        return False


def _is_error(module: str, name: str) -> bool:
    """One of Python's own, or of ours."""
    found = getattr({"builtins": builtins, "hfpaged.errors": errors}.get(module), name, None)
    return isinstance(found, type) and issubclass(found, BaseException)
