"""What a step takes, in place of a forward: seconds = a + b x prompt tokens + c x sequences that decode + d x stored
tokens that attention reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hfpaged.errors import InvalidConfigError


@dataclass(frozen=True)
class CostModel:
    """`step`, `prefill`, `decode`, `context`: the seconds a, b, c and d. `source` says where they come from, to people;
    `token_bytes` are those of a stored token where they were found, 0 if that is not known.
    """

    step: float
    prefill: float
    decode: float
    context: float
    source: str = "given"
    token_bytes: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.step, self.prefill, self.decode, self.context)
        if min(numbers) < 0 or not max(numbers) > 0 or not all(number < 1e6 for number in numbers):
            raise InvalidConfigError(
                f"a cost of a={self.step}, b={self.prefill}, c={self.decode}, d={self.context} seconds is none that a "
                "step can have; use numbers of 0 or more, not all of them 0"
            )

    def as_json(self) -> dict[str, float | str]:
        """For programs: seconds of a step, a prompt token, a sequence that decodes and a stored token that is read."""
        return {
            "step_seconds": self.step, "prefill_token_seconds": self.prefill, "decode_sequence_seconds": self.decode,
            "context_token_seconds": self.context, "source": self.source, "token_bytes": self.token_bytes,
        }  # fmt: skip

    def seconds(self, prefill: int, decodes: int, context: float) -> float:
        """Of one step."""
        return self.step + self.prefill * prefill + self.decode * decodes + self.context * context

    def for_token_bytes(self, token_bytes: float) -> CostModel:
        """Where a stored token has other bytes, reading it takes more or less time in proportion."""
        if not self.token_bytes or not token_bytes or token_bytes == self.token_bytes:
            return self
        return replace(self, context=self.context * token_bytes / self.token_bytes, token_bytes=token_bytes)


def parse_cost(text: str) -> CostModel:
    """A cost such as "a=0.01,b=2e-5,c=1e-4,d=1e-8"; what is left out is 0. Raises InvalidConfigError."""
    names = {"a": "step", "b": "prefill", "c": "decode", "d": "context"}
    numbers = dict.fromkeys(names.values(), 0.0)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            numbers[names[name.strip()]] = float(value)
        except (KeyError, ValueError) as error:
            raise InvalidConfigError(
                f"the cost {part!r} is none of a=, b=, c= and d= with a number of seconds; write a for a step, b for a "
                "prompt token, c for a sequence that decodes, d for a stored token that is read: a=0.01,b=2e-5,d=1e-8"
            ) from error
    return CostModel(numbers["step"], numbers["prefill"], numbers["decode"], numbers["context"])


def context_of(lengths: Iterable[int], windows: tuple[int | None, ...]) -> int:
    """Stored tokens that attention reads of sequences of these lengths, in all layer groups together."""
    if all(window is None for window in windows):
        return sum(lengths) * len(windows)
    return sum(min(length, window or length) for length in lengths for window in windows)
