"""Every error that hfpaged raises on purpose: the numbers, the rule that was broken, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HfpagedError(Exception):
    """Base of all errors that hfpaged raises on purpose."""


class InvalidConfigError(HfpagedError, ValueError):
    """A size, dtype or combination of arguments that cannot work; nothing was allocated."""


class OutOfBlocksError(HfpagedError):
    """The block pool has fewer free blocks than a sequence needs; nothing was taken."""

    def __init__(self, needed: int, free: int, total: int, hint: str = "") -> None:
        super().__init__(
            f"{needed} more blocks are needed, {free} of the pool's {total} are free. "
            "Give the pool more (memory= or num_blocks=), free other caches on it, or use fewer or shorter "
            f"sequences.{hint}"
        )
        self.needed, self.free, self.total = needed, free, total


class QueueFullError(HfpagedError):
    """As many requests as may wait are waiting; this one was not added."""

    def __init__(self, in_flight: int, max_num_seqs: int, max_queued: int) -> None:
        super().__init__(
            f"{in_flight} requests are in flight, and {max_num_seqs} may run (max_num_seqs) and {max_queued} wait "
            "(max_num_queued_requests); try again when some have ended, or raise one of the two"
        )


class CacheMismatchError(HfpagedError, ValueError):
    """Keys and values that do not belong to this cache: other shapes, another batch size, a broken order."""


class WindowPassedError(CacheMismatchError, RuntimeError):
    """A crop to before what layers with a window still hold; the cache stays as it was."""

    def __init__(self, length: int, seen: int, gone: int, window: int) -> None:
        super().__init__(
            f"a row cut to {length} tokens needs those from {seen} on for layers with a window of {window}, and the "
            f"first {gone} left that window and gave their blocks back; call activate_past_recording() on the cache "
            "before the forwards that crop() shall undo, or start with a fresh cache"
        )


class StreamPassedError(WindowPassedError):
    """A crop of a streaming cache to before what it still holds; the cache stays as it was."""

    def __init__(self, length: int, gone: int, window: int) -> None:
        CacheMismatchError.__init__(
            self,
            f"a row cut to {length} tokens needs the last {window} of them, and those before position {gone} have "
            "been forgotten; crop no further than the last forward, or start with a fresh cache",
        )


class StreamingError(HfpagedError, RuntimeError):
    """Something that a streaming cache, which forgets, cannot do."""


class PackedForwardError(HfpagedError, RuntimeError):
    """A packed forward met code that wants a dense view; its sequences must be computed one by one."""

    def __init__(self, reason: str, num_sequences: int) -> None:
        super().__init__(
            f"{num_sequences} sequences lie side by side in this forward, and a dense view of one row is needed "
            f"({reason}); compute them one by one"
        )
        self.reason = reason


class MixedForwardError(HfpagedError, RuntimeError):
    """A forward with several adapters met a layer that cannot take them side by side; each needs its own forward."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"tokens of several adapters lie side by side in this forward, and {reason}; compute them apart"
        )
        self.reason = reason


class AdapterLostError(HfpagedError, ValueError):
    """Adapters that requests have chosen cannot act any more; those requests fail, and no other."""

    def __init__(self, names: Iterable[str | None], why: str) -> None:
        super().__init__(f"{why}: the requests that have chosen it fail; load it again and send them again")
        self.names = frozenset(names)


class RequestTooLongError(HfpagedError, ValueError):
    """A request that can never fit: into the pool, or into the model's context. Nothing was taken."""


class BatcherClosedError(HfpagedError, RuntimeError):
    """A request for an engine that is closed or not running."""


class NestedStepError(HfpagedError, RuntimeError):
    """A batcher was told to step inside of one of its own steps."""


class UnsupportedModelError(HfpagedError, ValueError):
    """A model whose cache cannot be paged, with the way that works instead."""


class CheckpointError(HfpagedError, ValueError):
    """Files of a model that lack weights of it, or have others than it has a place for; it was not loaded."""


class AutogradError(HfpagedError, RuntimeError):
    """A gradient for keys of an earlier forward, which lie in the pool without their graph."""


class PrefixFileError(HfpagedError, ValueError):
    """A file of saved prefixes that is damaged, or of another model, format or block size; nothing was loaded."""


class KVScalesError(HfpagedError, ValueError):
    """A file of static scales that is damaged, or of another model; nothing was loaded."""


class InvalidLogitsError(HfpagedError, ValueError):
    """Logits that are no numbers, of which no token can be chosen; the request that they belong to fails."""

    def __init__(self, bad: int, rows: int) -> None:
        super().__init__(
            f"{bad} of {rows} rows of logits hold NaN, and a token can be chosen among numbers only; look for overflow "
            "in the model (float16 where it was trained in bfloat16) or for a logits processor that divides by zero"
        )


class CallbackError(HfpagedError, RuntimeError):
    """A request's own function raised, or gave back what cannot be used; that request alone fails."""


class MetricsError(HfpagedError, ValueError):
    """What should be metrics of hfpaged cannot be had, cannot be read, or is something else."""


class RanksDifferError(HfpagedError, RuntimeError):
    """The processes that compute one model together were given, or chose, different things; all of them raise it."""

    def __init__(self, what: str, by_rank: Sequence[int], rank: int, remedy: str) -> None:
        other = next(number for number, given in enumerate(by_rank) if given != by_rank[0])
        super().__init__(
            f"{what}: rank 0 and rank {other} of {len(by_rank)} differ (this is rank {rank}), and all ranks must "
            f"compute the same tokens; {remedy}"
        )
        self.by_rank, self.rank = tuple(by_rank), rank


class RankLostError(HfpagedError, RuntimeError):
    """One of the processes that compute a model together has died, hangs or failed: none of the others can go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; none of the ranks can go on without the others: start all of them again")
        self.reason = reason


class NotLeaderError(HfpagedError, RuntimeError):
    """Something that rank 0 alone can do was asked of another one of the processes that compute a model together."""


class IntegrityError(HfpagedError, AssertionError):
    """The pool's books do not agree with what its block tables hold: a bug of hfpaged, never of its user. `blocks` are
    those that are off, as far as that is known.
    """

    def __init__(self, message: str, blocks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.blocks = tuple(blocks)
