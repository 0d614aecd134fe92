"""The lengths at which texts are compared. Free of torch, so that help and errors are quick."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfpaged.errors import InvalidConfigError

DEFAULT_CONTEXTS = "short,1k"
TEXTS = 12  # of 127 or 128 scored tokens each: 1,500 in all
QUICK_CONTEXTS, QUICK_TEXTS = "short", 4  # a gate of some 500 scored tokens
FED = 128  # tokens that are fed one by one at the end of each text
SHORTEST = 8
NAMED: dict[str, int | None] = {"short": 128, "1k": 1024, "4k": 4096, "max": None}


@dataclass(frozen=True)
class Context:
    """Texts of `length` tokens in the cache, the last `fed` of which come one by one. The prompt before them is
    computed in one forward, natively in every format: what it predicts is not scored.

    `length` is None for as much as model and data allow; `note` says what was cut.
    """

    name: str
    length: int | None
    note: str = ""

    @property
    def cached(self) -> int:
        """The length, once it is known."""
        assert self.length is not None
        return self.length

    @property
    def fed(self) -> int:
        return self.cached - 1 if self.cached <= 2 * FED else FED

    @property
    def prompt(self) -> int:
        return self.cached - self.fed

    def fitted(self, positions: int | None, available: int) -> Context:
        """Cut to what the model has `positions` for. Raises InvalidConfigError where the data, of `available` tokens,
        are too few: each text needs one more than its length, the last token to be predicted.
        """
        most = available - 1
        length = min(most, positions or most) if self.length is None else min(self.length, positions or self.length)
        if length > most or length < SHORTEST:
            raise InvalidConfigError(
                f"the data have {available} tokens, and context {self.name} needs {max(length, SHORTEST) + 1}; give a "
                f"longer text, or --contexts with at most {most}"
            )
        is_cut = self.length is not None and length < self.length
        note = f"cut from {self.length} to {length} tokens, the model's most" if is_cut else ""
        if self.length is None and positions is not None and length < positions:
            note = f"{length} of the model's {positions} positions, the data have no more"
        return replace(self, length=length, note=note)


def parse_contexts(text: str) -> list[Context]:
    """ "short,1k,300" as contexts, each once. Raises InvalidConfigError."""
    return [_parse(name) for name in dict.fromkeys(part.strip() for part in text.split(","))]


def fit_all(contexts: list[Context], positions: int | None, available: int) -> list[Context]:
    """All of them fitted; what comes out as long as an earlier one is left out."""
    fitted = [context.fitted(positions, available) for context in contexts]
    return list({context.length: context for context in reversed(fitted)}.values())[::-1]


def _parse(name: str) -> Context:
    if name in NAMED:
        return Context(name, NAMED[name])
    if name.isdecimal() and int(name) >= SHORTEST:
        return Context(name, int(name))
    raise InvalidConfigError(
        f"--contexts {name}: a length is one of {', '.join(NAMED)}, or a number of tokens from {SHORTEST} on"
    )
