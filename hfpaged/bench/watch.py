"""Looks at generate() after each of its steps. transformers calls stopping criteria there; these never stop it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class Watch(StoppingCriteria):
    """Calls `look()` after every step."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._look()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Together(Watch):
    """Several watches, in their order."""

    def __init__(self, *watches: Watch) -> None:
        super().__init__(self._look_with_all)
        self._watches = watches

    def _look_with_all(self) -> None:
        for watch in self._watches:
            watch._look()


class StepClock(Watch):
    """The seconds of each step but the first, which has the preparations of generate() in it."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__(self._stamp)
        self._synchronize = synchronize
        self._stamps: list[float] = []

    @property
    def first(self) -> float:
        """When the first step was over, by time.perf_counter."""
        return self._stamps[0]

    @property
    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self._stamps, self._stamps[1:], strict=False)]

    def _stamp(self) -> None:
        self._synchronize()
        self._stamps.append(time.perf_counter())


class Peak(Watch):
    """The largest number that `size()` gave after any step."""

    def __init__(self, size: Callable[[], int]) -> None:
        super().__init__(self._sample)
        self._size = size
        self.largest = 0

    def _sample(self) -> None:
        self.largest = max(self.largest, self._size())
