"""What a request can ask for that generate() knows nothing of, or by other names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hfpaged.engine.param_rules import BOUNDS
from hfpaged.errors import InvalidConfigError

# OpenAI's names for two of transformers' own, which count new tokens as well.
ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "n": "num_return_sequences"}


@dataclass(frozen=True, kw_only=True)
class OwnParams:
    """Settings besides those of a GenerationConfig.

    best_of             so many sequences are sampled, and the n with the best mean logprob given back
    seed                of the request's own generator; the same seed gives the same tokens in any company
    logprobs            of each new token, before any processor, so many alternatives; 0: the token's own only
    prompt_logprobs     the same of the prompt's tokens
    frequency_penalty   taken off a token's logit for each time that it has been generated, from -2 to 2 (OpenAI's)
    presence_penalty    taken off once if it has been generated at all, from -2 to 2 (OpenAI's)
    logit_bias          added to logits, by token id; -inf bans a token
    stop                strings that end a sequence, like stop_strings (both count)
    include_stop_str_in_output   whether the text keeps the string or the token that stopped it
    skip_special_tokens   leave special tokens out of the text
    ignore_eos          go on behind the model's end-of-sequence tokens
    """

    best_of: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidConfigError for values that cannot be."""
        for name in ("best_of", "seed", "logprobs", "prompt_logprobs", "frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if value is not None:
                BOUNDS[name].check(name, value)
        object.__setattr__(self, "stop", stop_strings("stop", self.stop))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                raise InvalidConfigError(
                    f"logit_bias has {bias!r} for token {token_id}, which cannot be added to a logit; "
                    "use numbers, or -inf for a token that must not come"
                )

    def check_tokens(self, vocab_size: int) -> None:
        """Raises InvalidConfigError for a bias of a token that the model has not."""
        for token_id in self.logit_bias:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidConfigError(
                    f"logit_bias names token {token_id!r}, and the model has tokens 0 to {vocab_size - 1}; "
                    "use ids of its own tokenizer"
                )


NAMES = frozenset(f.name for f in fields(OwnParams))


def stop_strings(name: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """One string or several, each once. Raises InvalidConfigError for anything else, and for empty ones."""
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    for text in strings:
        if not isinstance(text, str) or not text:
            raise InvalidConfigError(f"{name} has {text!r}, which ends no text; use strings of 1 or more characters")
    return tuple(dict.fromkeys(strings))


def without_aliases(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by transformers' names. Raises InvalidConfigError where both names are used and do not agree."""
    renamed = dict(arguments)
    for alias, name in ALIASES.items():
        value = renamed.pop(alias, None)
        if value is None:
            continue
        if renamed.get(name, value) not in (value, None):
            raise InvalidConfigError(
                f"{alias}={value!r} and {name}={renamed[name]!r} are two names of one thing; give one of them"
            )
        if alias in BOUNDS:
            BOUNDS[alias].check(alias, value)
        renamed[name] = value
    return renamed


def fresh_seed() -> int:
    """A seed of torch's global generator, so that torch.manual_seed() makes requests without seeds repeatable."""
    return int(torch.randint(2**63 - 1, ()).item())
