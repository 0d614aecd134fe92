"""Masks that transformers composes, and what we read of them."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as masks

from hfpaged.mask_pattern import MaskPattern, mask_pattern

QUERIES = slice(4, 8)
CAUSAL = masks.causal_mask_function
NO_IMAGE = masks.blockwise_overlay(torch.full((2, 8), -1))
OLD_IMAGE = masks.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1, -1, -1, -1]] * 2))
NEW_IMAGE = masks.blockwise_overlay(torch.tensor([[-1] * 8, [-1, -1, -1, -1, -1, 1, 1, -1]]))
WINDOW = masks.sliding_window_overlay(3)


def chunked(size: int):
    return masks.chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.int))


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (CAUSAL, MaskPattern(True)),
        (masks.sliding_window_causal_mask_function(3), MaskPattern(True, 3)),
        (masks.and_masks(masks.sliding_window_causal_mask_function(5), WINDOW), MaskPattern(True, 3)),
        (WINDOW, MaskPattern(False, 3)),
        (masks.or_masks(CAUSAL, NO_IMAGE), MaskPattern(True)),
        (masks.or_masks(CAUSAL, OLD_IMAGE), MaskPattern(True)),
        (masks.or_masks(CAUSAL, NEW_IMAGE), None),
        (masks.and_masks(WINDOW, masks.or_masks(CAUSAL, NO_IMAGE)), MaskPattern(True, 3)),
        (masks.and_masks(WINDOW, masks.or_masks(CAUSAL, NEW_IMAGE)), None),
        (masks.or_masks(CAUSAL, WINDOW), None),
        (chunked(8), MaskPattern(True)),
        (chunked(7), None),
        (masks.bidirectional_mask_function, None),
        (lambda *place: place, None),
    ],
)
def test_a_pattern_is_read_or_unknown(function, pattern):
    assert mask_pattern(function, QUERIES) == pattern
    if pattern is not None and pattern.is_causal:  # and it is what the function says
        for query in range(QUERIES.start, QUERIES.stop):
            for key in range(QUERIES.stop):
                sees = bool(function(torch.tensor(1), torch.tensor(0), torch.tensor(query), torch.tensor(key)))
                far = pattern.window is not None and query - key >= pattern.window
                assert sees == (key <= query and not far)


def test_a_function_of_that_name_from_elsewhere_is_unknown():
    def sliding_window_overlay(sliding_window):
        return lambda *place: sliding_window

    made = sliding_window_overlay(3)
    made.__qualname__ = WINDOW.__qualname__
    assert mask_pattern(made, QUERIES) is None
