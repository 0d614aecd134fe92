"""What is said of a prompt that was looked up: how much of it was known, and why no more."""

from __future__ import annotations

import time
from dataclasses import dataclass

_KEY_NAMES = {
    "adapter": "with another adapter, or with none",
    "adapter scales": "with an adapter at another scale",
    "autocast": "under another autocast dtype",
    "device": "on another device",
    "hook": "under other forward hooks",
    "model": "for other weights of the model",
    "rank": "with the heads of another rank",
    "salt": "under another salt",
    "width": "with other inputs besides the tokens",
}


@dataclass(frozen=True)
class TokenDifference:
    """The first token in which a prompt differs from the known one that is most like it.

    `here_text` and `known_text` are the whole words, dates, numbers ... of which those tokens are a part, the contexts
    a few tokens around them; all None without a tokenizer. `kind` is a guess at what they are: "date", "time", "uuid",
    "number", "user name", or None; "input" where the token is the same and something else given with it differs.

    `same_behind` tokens behind the difference are the same in both, in `num_runs` runs. `saved_tokens` of them, in
    full blocks, would have been found had all that differs before them stood behind them.
    """

    position: int
    here_token: int
    known_token: int
    same_behind: int = 0
    num_runs: int = 0
    saved_tokens: int = 0
    here_text: str | None = None
    known_text: str | None = None
    here_context: str | None = None
    known_context: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        return f"it first differs at token {self.position}: {self._what()}; {self._behind()}"

    def _what(self) -> str:
        if self.kind == "input":
            return f"token {self.here_token} is the same, what is given with it (positions, types, embeddings) is not"
        if self.here_text is None:
            return f"{self.here_token} (here) vs {self.known_token} (known)"
        kind = {None: "", "uuid": ": a UUID"}.get(self.kind, f": a {self.kind}")
        return f"{self.here_text!r} (here) vs {self.known_text!r} (known){kind}"

    def _behind(self) -> str:
        if not self.same_behind:
            return "no long run of tokens behind it is the same"
        same = f"{self.same_behind} more {'token is' if self.same_behind == 1 else 'tokens'} behind it are the same"
        if self.num_runs == 1:
            return f"{same} and would be found if it stood behind them"
        return (
            f"{same} and would be found if it and what else differs before them ({self.num_runs} places) stood behind"
        )


@dataclass(frozen=True)
class PrefixReport:
    """Where the match of a prompt with the published prefixes ended, and why. `str()` says it in a sentence.

    `reason` is one of
        "complete": all is known but the last tokens, which are computed in any case, for their logits;
        "declined": nothing was looked up, `declined` says why;
        "never seen": nothing known goes on like the prompt;
        "below block size": what is left of the prompt fills no block, and only full blocks are kept;
        "evicted": at `evicted_at` (seconds since 1970) a block had to make room; `lost_tokens` more would be known, of
            which `host_tokens` are in host memory and come back when that is cheaper than computing them;
        "left window": the next tokens are known, but not those that the windows of some layers show;
        "other key": `other_tokens` are known for other extra keys, which differ in `differing_keys` ("salt",
            "adapter", "adapter scales", "model", "device", "autocast", "hook", "width", "input:" and a name), whose
            values are not told;
        "differs": see `difference`.

    It tells about prompts of everybody on the pool, if not their salts: it is for whoever runs them, not for tenants.

    `hit_tokens` need not be computed. They are fewer than `known_tokens` where a batch is faster computed as a whole.
    Token positions count from 0.
    """

    query_tokens: int
    known_tokens: int
    hit_tokens: int
    reason: str
    block_size: int
    evicted_at: float | None = None
    lost_tokens: int = 0
    differing_keys: tuple[str, ...] = ()
    other_tokens: int = 0
    difference: TokenDifference | None = None
    declined: str | None = None
    host_tokens: int = 0

    def __str__(self) -> str:
        if self.declined is not None:
            return f"no prefix of these {self.query_tokens} prompt tokens was looked up: {self.declined}"
        known = f"{self.known_tokens} of {self.query_tokens} prompt tokens are known"
        if self.hit_tokens < self.known_tokens:
            again = self.known_tokens - self.hit_tokens
            known += f" ({again} of them are computed again, as the rows of a batch are computed together)"
        return f"{known}: {self._why()}"

    def _why(self) -> str:
        left = self.query_tokens - self.known_tokens
        if self.reason == "complete":
            return f"all but the last {left}, which must be computed for the logits"
        if self.reason == "evicted" and self.host_tokens:
            which = "they" if self.host_tokens == self.lost_tokens else f"{self.host_tokens} of them"
            return (
                f"{self.lost_tokens} more were known until a block was evicted at {_clock(self.evicted_at)}; {which} "
                "are in host memory, and come back where there are blocks for them and computing takes longer"
            )
        if self.reason == "evicted":
            return (
                f"{self.lost_tokens} more were known until a block was evicted at {_clock(self.evicted_at)}; "
                "a larger pool keeps them longer, pin_prefix() for good"
            )
        if self.reason == "left window":
            return (
                f"{self.lost_tokens} more are known, but layers with a window keep only what its end shows, and this "
                "prompt needs what had left the window before"
            )
        if self.reason == "other key":
            names = (_KEY_NAMES.get(kind, f"with other {kind.removeprefix('input:')}") for kind in self.differing_keys)
            how = " and ".join(names)
            return f"{self.other_tokens} are known {how}, which is never shared"
        if self.reason == "below block size":
            what = f"the {left} behind them fill" if self.known_tokens else "they fill"
            return f"{what} no block of {self.block_size}, and only full blocks are kept"
        if self.difference is not None:
            return str(self.difference)
        return "nothing known goes on behind them" if self.known_tokens else "no known prompt begins like this one"


def _clock(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
