"""The bytes of one model under given choices, each worked out once: ways out ask for the same ones again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hfpaged.planner.layout import PoolLayout
from hfpaged.planner.model_facts import ModelFacts
from hfpaged.planner.pool_layout import cross_bytes, dense_bytes, layout_of

if TYPE_CHECKING:
    from hfpaged.planner.case import Choices

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank, and where they are known from."""

    bytes: int
    source: str


class Sizes:
    """Of `facts`. `weights` and `activations` are bytes that are given instead of worked out."""

    def __init__(self, facts: ModelFacts, weights: int | None = None, activations: int | None = None) -> None:
        self.facts = facts
        self._weights, self._activations = weights, activations
        self._known: dict[Hashable, Any] = {}

    @property
    def has_given_weights(self) -> bool:
        """Whether no dtype changes them."""
        return self._weights is not None

    def layout(self, choices: Choices) -> PoolLayout:
        """The pool of one rank. Raises InvalidConfigError."""
        key = (choices.kv_format, choices.block_size, choices.tp, choices.window, choices.dtype)
        return self._once(("layout", *key), lambda: layout_of(self.facts, *key))

    def weights(self, choices: Choices) -> Weights:
        """Of one rank, as transformers' tp_plan splits them."""
        key = (choices.dtype, choices.weights_dtype, choices.tp)
        return self._once(("weights", *key), lambda: self._read_weights(*key))

    def activations(self, choices: Choices, rows: int) -> int:
        """What a step with the whole token budget takes for a while, in which `rows` requests get a token."""
        if self._activations is not None:
            return self._activations
        key = (choices.token_budget, choices.dtype, rows, choices.tp)
        return self._once(("activations", *key), lambda: self._work(*key))

    def cross(self, encoder: int, choices: Choices) -> int:
        """What transformers' own cache keeps of the `encoder` tokens of one sequence."""
        return cross_bytes(self.facts, encoder, choices.tp, choices.dtype)

    def dense(self, tokens: int, encoder: int, choices: Choices) -> int:
        """What transformers' own cache keeps of one sequence of `tokens` tokens, in the dtype that it computes."""
        return dense_bytes(self.facts, tokens, choices.tp, choices.dtype) + self.cross(encoder, choices)

    def _read_weights(self, dtype: str | None, quantization: str | None, tp: int) -> Weights:
        from hfpaged.planner.weights import given_bytes, weight_bytes

        if self._weights is not None:
            return Weights(given_bytes(self.facts, self._weights, tp), "as given" + ", split" * (tp > 1))
        found = weight_bytes(self.facts, dtype, quantization, tp)
        return Weights(found.bytes, found.source)

    def _work(self, tokens: int, dtype: str | None, rows: int, tp: int) -> int:
        from hfpaged.planner.activations import activation_bytes

        return activation_bytes(self.facts, tokens, dtype, rows, tp)

    def _once(self, key: Hashable, work: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = work()
        found: T = self._known[key]
        return found
