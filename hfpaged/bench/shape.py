"""How much a row of the benchmark computes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """`batch` prompts of at most `prompt` tokens, `new` tokens after each of them.

    Where prompts begin alike, `prompt` tokens are common to all, and at most `own` follow in each.
    """

    batch: int
    prompt: int
    new: int
    own: int = 0

    def quick(self) -> Shape:
        """Small enough for a smoke test."""
        return Shape(min(self.batch, 2), min(self.prompt, 64), min(self.new, 8), min(self.own, 16))

    def fitted(self, positions: int | None) -> Shape:
        """With a prompt that leaves room for the tokens behind it in a model of `positions` positions."""
        if positions is None or self.prompt + self.own + self.new <= positions:
            return self
        return replace(self, prompt=max(positions - self.own - self.new, 1))
