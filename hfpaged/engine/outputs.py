"""What the engine gives back: frozen records of a request as it stood at the end of one step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(NamedTuple):
    """A token that stood to choice. `logprob`: natural logarithm of its probability before any processor. `rank`: 1 is
    the most likely token.
    """

    token_id: int
    logprob: float
    rank: int | None = None


class PositionLogprobs(NamedTuple):
    """The token at one position, and the `top` most likely ones there, best first."""

    token_id: int
    logprob: float
    rank: int | None
    top: tuple[TokenLogprob, ...] = ()


class Tokens(NamedTuple):
    """The first `stop` numbers of an array that only grows, from `start` on: a snapshot that costs nothing."""

    buffer: array[int]
    start: int
    stop: int

    def __repr__(self) -> str:
        return f"Tokens({self.tolist()})"  # what the array got since is not of this snapshot

    def tolist(self, skipped: int = 0) -> list[int]:
        """Without the first `skipped` of them."""
        return self.buffer[self.start + skipped : self.stop].tolist()


class SequenceOutput(NamedTuple):
    """One sequence of a request. `tokens` are the new ones, `text` what is sure of theirs (None without tokenizer)."""

    index: int  # type: ignore[assignment]
    tokens: Tokens
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token or the string that stopped it
    cumulative_logprob: float | None = None  # of beams: the score that they are ordered by
    logprobs: tuple[PositionLogprobs, ...] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The new token ids, the end-of-sequence token included."""
        return self.tokens.tolist()


class RequestMetrics(NamedTuple):
    """Times in seconds since the epoch, None for what has not come.

    Memory is what the blocks in its tables take in all layers. `byte_seconds` is that integrated over time, what the
    request cost: of a block with several holders each bears an equal part. `waits` are seconds by cause: "blocks" (not
    enough free ones), "seats" (max_num_seqs), "budget" (max_num_batched_tokens), "prefix" (another request is computing
    what it needs), "turn" (for the next step, behind those before it); of several samples that wait at once, of each.
    """

    arrival_time: float
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    peak_blocks: int = 0  # the most blocks that its tables held, shared ones counted once
    computed_tokens: int = 0  # in forwards, those of preempted sequences again
    draft_tokens: int = 0  # proposed by speculation, and those of them that were right
    accepted_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the pool when it was admitted first
    peak_bytes: int = 0
    shared_bytes: int = 0  # the most of them in blocks that others held too
    byte_seconds: float = 0.0
    waits: Mapping[str, float] = MappingProxyType({})
    new_tokens: int = 0  # in all samples, those that best_of leaves out too

    @property
    def queue_time(self) -> float | None:
        """Seconds from its arrival to its first admission."""
        return None if self.admitted_time is None else self.admitted_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request as it stands. What the first sequence has can be read from the request itself.

    num_cached_tokens  tokens of the prompt that were found in the pool, and not computed
    prompt_logprobs    one entry for each prompt token, None for the first; None where they were not asked for
    error              why it failed, where finish_reason is "error"
    """

    request_id: str
    prompt_token_ids: list[int]
    sequences: tuple[SequenceOutput, ...]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt: str | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    error: BaseException | None = None

    @property
    def token_ids(self) -> list[int]:
        """The new token ids of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def text(self) -> str | None:
        """The new text of the first sequence; None without a tokenizer."""
        return self.sequences[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first sequence, None while it is running; "error" or "abort" where any of its sequences ended so."""
        reasons = [seq.finish_reason for seq in self.sequences]
        return "error" if "error" in reasons else "abort" if "abort" in reasons else reasons[0]

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """Of the new tokens of the first sequence."""
        return self.sequences[0].logprobs
