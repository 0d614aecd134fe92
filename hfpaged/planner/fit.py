"""Whether a workload fits: the pool is what weights, activations and the rest leave of the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hfpaged.planner.case import USUAL_SEQUENCES, Case
from hfpaged.planner.layout import PoolLayout
from hfpaged.planner.sizes import Weights

# More requests, or longer ones, than anybody plans for: where nothing else is an end.
MANY, LONG = 1_000_000, 1 << 24


@dataclass(frozen=True)
class Fit:
    """The answer to `case`, in bytes of one rank of one replica. Everything is worked out from records, nothing from a
    formula that stands for them: blocks are rounded up, windows and states counted as the pool would.
    """

    case: Case
    layout: PoolLayout
    weights: Weights
    activations: int

    @property
    def usable(self) -> int:
        """Replicas on a CPU live in one memory, those on cards have one each."""
        usable = int(self.case.machine.memory * self.case.choices.utilization)
        return usable // self.case.choices.replicas if self.case.machine.is_cpu else usable

    @property
    def in_use(self) -> int:
        """Of what one replica could have, by others."""
        in_use = self.case.machine.in_use
        return in_use // self.case.choices.replicas if self.case.machine.is_cpu else in_use

    @property
    def asked(self) -> int | None:
        """Requests that are to run at once on one replica, None where nothing was asked."""
        return per_replica(self.case)

    @property
    def pool(self) -> int:
        """What is left for keys and values; below 0 where something is missing before there is any."""
        if self.case.choices.pool is not None:
            return self.case.choices.pool
        machine = self.case.machine
        return self.usable - self.in_use - self.weights.bytes - self.activations - machine.overhead

    @cached_property
    def sequences(self) -> int:
        """Requests of the workload's size that the pool holds at once."""
        return self._count(self.case.workload.tokens)

    @property
    def concurrency(self) -> int:
        """Requests that are to run at once on one replica: those asked for, or all that fit, and at least one."""
        return self.asked or max(1, self.sequences)

    @cached_property
    def longest(self) -> int:
        """Tokens that each request may have if as many as were asked for run at once; one, where nothing was asked."""
        return self.longest_of(self.asked or 1)

    @property
    def limit(self) -> int:
        """Tokens of the longest text that the model is made for."""
        return self.case.sizes.facts.max_positions or LONG

    @property
    def tokens(self) -> int:
        """Tokens in the pool when it is full of such requests."""
        return self.sequences * self.case.workload.tokens

    @property
    def request(self) -> int:
        """One request, once its prompt is computed."""
        return self.layout.sequence_bytes(self.case.workload.tokens) + self._cross()

    @property
    def passing(self) -> int:
        """What windows take besides, while a prompt is computed."""
        return self._passing(self.case.workload.tokens) * self.layout.block_bytes

    @property
    def needed(self) -> int:
        """Of the pool: by all requests together, or by the longest one that is allowed where that is more."""
        return max(
            self.kv_bytes(self.case.workload.tokens, self.concurrency), self.kv_bytes(self.case.workload.context, 1)
        )

    @property
    def short(self) -> int:
        """Bytes that are missing, 0 where it fits."""
        return max(0, self.needed - self.pool)

    @property
    def fits(self) -> bool:
        return self.short == 0

    @property
    def shared_blocks(self) -> int:
        """Blocks that all requests share, in one pool."""
        return self._blocks(self.case.workload.tokens)[0]

    def longest_of(self, count: int) -> int:
        """Tokens that each of `count` requests may have, at most what the model is made for."""
        low, high = 0, max(self.limit, self.case.workload.context)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.kv_bytes(middle, count) <= self.pool else (low, middle - 1)
        return low

    def kv_bytes(self, tokens: int, count: int) -> int:
        """Of `count` requests of `tokens` tokens: blocks of a common prefix once, and what passes through windows."""
        shared, own = self._blocks(tokens)
        blocks = shared + own * count + self._passing(tokens)
        return blocks * self.layout.block_bytes + self.beside(tokens) * count

    def beside(self, tokens: int) -> int:
        """Of one sequence, outside of blocks: whole sequences less their blocks, and what an encoder read."""
        in_blocks = self.layout.blocks(tokens) * self.layout.block_bytes
        return self.layout.sequence_bytes(tokens) - in_blocks + self._cross()

    @property
    def dense(self) -> int:
        """What transformers' own cache takes for the same requests: nothing shared, all of one length, unquantized."""
        case = self.case
        one = case.sizes.dense(case.workload.tokens, case.workload.encoder, case.choices)
        return one * self.concurrency

    def _cross(self) -> int:
        return self.case.sizes.cross(self.case.workload.encoder, self.case.choices)

    def _passing(self, tokens: int) -> int:
        """Blocks of one request's prompt, for which others wait. A window that was asked for counts it already."""
        choices = self.case.choices
        return 0 if choices.window is not None else self.layout.passing_blocks(tokens, choices.token_budget)

    def _count(self, tokens: int) -> int:
        shared, own = self._blocks(tokens)
        each = own * self.layout.block_bytes + self.beside(tokens)
        left = self.pool - (shared + self._passing(tokens)) * self.layout.block_bytes
        if left < 0:
            return 0
        return min(left // each, MANY) if each else MANY

    def _blocks(self, tokens: int) -> tuple[int, int]:
        """Blocks that all requests share, and those of each one. Full ones are shared alone, and of those only what is
        still within a window.
        """
        size, prefix = self.layout.block_size, min(self.case.workload.shared_prefix, tokens)
        gone = [tokens - min(tokens, window or tokens) for window in self.layout.windows]
        shared = sum(max(0, prefix // size - -(-past // size)) for past in gone)
        return shared, self.layout.blocks(tokens) - shared


def per_replica(case: Case) -> int | None:
    """Of the requests that are asked for at once, the most that one replica gets; None where none are."""
    asked = case.workload.concurrency
    return None if asked is None else -(-asked // case.choices.replicas)


def fit(case: Case) -> Fit:
    """Work it out. Raises InvalidConfigError for choices that the model cannot take."""
    sizes, choices = case.sizes, case.choices
    rows = per_replica(case) or USUAL_SEQUENCES
    return Fit(case, sizes.layout(choices), sizes.weights(choices), sizes.activations(choices, rows))
