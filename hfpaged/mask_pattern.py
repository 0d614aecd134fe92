"""What a mask of transformers is made of, read from the closures that it composes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.masking_utils import causal_mask_function


@dataclass(frozen=True)
class MaskPattern:
    """What a mask is made of beside padding: causal or not, and how far back a query sees."""

    is_causal: bool = False
    window: int | None = None

    def __and__(self, other: MaskPattern) -> MaskPattern:
        windows = [window for window in (self.window, other.window) if window is not None]
        return MaskPattern(self.is_causal or other.is_causal, min(windows, default=None))


def mask_pattern(mask_function: Callable[..., Any], queries: slice) -> MaskPattern | None:
    """The pattern of a mask for the positions `queries`; None where it is more than causal, perhaps with a window.

    transformers composes masks of closures; what is not known here by name is left to the dense path.
    """
    if mask_function is causal_mask_function:
        return MaskPattern(is_causal=True)
    kind, parts = _maker(mask_function), _closure(mask_function)
    if kind == "sliding_window_overlay":
        return MaskPattern(window=int(parts["sliding_window"]))
    if kind == "chunked_overlay":
        return MaskPattern() if queries.stop <= parts["chunk_size"] else None  # all of it is the first chunk
    if kind == "and_masks":
        patterns = [mask_pattern(part, queries) for part in parts["mask_functions"]]
        return None if None in patterns else functools.reduce(operator.and_, patterns)
    if kind == "or_masks":
        rest = [part for part in parts["mask_functions"] if not _adds_nothing(part, queries)]
        return mask_pattern(rest[0], queries) if len(rest) == 1 else None
    return None


def _adds_nothing(mask_function: Callable[..., Any], queries: slice) -> bool:
    """Whether it lets images see all of themselves, and no query belongs to one."""
    if _maker(mask_function) != "blockwise_overlay":
        return False
    return not bool((_closure(mask_function)["block_sequence_ids"][:, queries] >= 0).any())


def _maker(mask_function: Callable[..., Any]) -> str:
    """The function of transformers that made this one."""
    is_theirs = getattr(mask_function, "__module__", None) == causal_mask_function.__module__
    return mask_function.__qualname__.split(".")[0] if is_theirs else ""


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    if names is None or not cells:
        return {}
    return dict(zip(names.co_freevars, (cell.cell_contents for cell in cells), strict=True))
