"""Compiled functions whose machine code is kept for the next process, where there is a place for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit

logger = logging.getLogger("hfpaged.kernels")
_told = False


def kept(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's `njit(cache=True)`, and without it where neither the package's folder nor the user's can be written:
    containers with a read-only file system have no such place.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            _tell(error)
            return njit(**options)(function)

    return compiled


def _tell(error: RuntimeError) -> None:
    global _told
    if not _told:
        _told = True
        logger.warning(
            "kernels are compiled anew in each process, a minute or more (%s); set NUMBA_CACHE_DIR to a folder of "
            "yours that can be written", error,
        )  # fmt: skip
