"""What a call on rank 0 gave or raised, as numbers for the other ranks. They are processes of one program, and trust
each other.
"""

from __future__ import annotations

import io
import pickle
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hfpaged.errors import HfpagedError

Ints = npt.NDArray[np.int64]


class _Pickler(pickle.Pickler):
    """Knows what the standard one does not: read-only mappings, and errors that are not made from their text alone."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, MappingProxyType):
            return MappingProxyType, (dict(thing),)
        if isinstance(thing, BaseException) and not _comes_back(thing):
            return HfpagedError, (f"{type(thing).__name__}: {thing}",)
        return NotImplemented


def to_numbers(value: Any, error: BaseException | None) -> Ints:
    """One of the two, as int64 numbers: the count of bytes, and these, eight in each."""
    told = io.BytesIO()
    _Pickler(told).dump((value, error))
    content = told.getvalue()
    padded = content + bytes(-len(content) % 8)
    return np.concatenate([[len(content)], np.frombuffer(padded, dtype=np.int64)])


def from_numbers(numbers: Ints) -> Any:
    """The value; raises the error."""
    value, error = pickle.loads(numbers[1:].tobytes()[: int(numbers[0])])
    if error is not None:
        raise error
    return value


def _comes_back(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
