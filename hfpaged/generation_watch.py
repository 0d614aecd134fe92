"""What can be seen of generate() from outside: a call with a PagedCache is told of while somebody watches.

generate() itself is wrapped then, for all models of the process, and as it was before when nobody watches any more.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from transformers import GenerationMixin, PreTrainedModel

from hfpaged import compat, generation_events
from hfpaged.admission import Found
from hfpaged.clock import now
from hfpaged.generation_events import GenerationBegan, GenerationCall, GenerationEnded, GenerationPrefilled
from hfpaged.generation_inputs import (
    count_new_tokens,
    named_arguments,
    prompt_tokens,
    row_count,
    settings,
    wants_no_paged_cache,
)
from hfpaged.memory_account import MemoryAccount
from hfpaged.prefix_block import Origin

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache

logger = logging.getLogger("hfpaged")

_lock = threading.Lock()
_in_use: Callable[..., Any] | None = None  # what generate() is wrapped in
_current: ContextVar[Recording | None] = ContextVar("hfpaged_generation", default=None)


F = TypeVar("F", bound=Callable[..., Any])


def _harmless(look: F) -> F:
    """Who generates must not lose his output to those who only watch: what fails here is said in the log."""

    @functools.wraps(look)
    def run(*args: Any) -> Any:
        try:
            return look(*args)
        except Exception:
            logger.exception("a call of generate() could not be watched (%s)", look.__name__)
            return None

    return cast(F, run)


def current() -> Recording | None:
    """Of the call under way in this context, the innermost one."""
    return _current.get()


class Recording:
    """One call of generate() while it runs."""

    def __init__(self, call: GenerationCall, cache: PagedCache | None) -> None:
        self.call = call
        self._cache = cache  # None until its first forward, where generate() makes the cache
        self._memory = MemoryAccount()
        self._lookup: Any = None  # the cache's last one, from before this call
        self._forward_began = call.began
        self._past = self._forwards = 0
        self._first_token_time: float | None = None
        self._block_bytes = 0

    @_harmless
    def forward_begins(self, cache: PagedCache) -> None:
        """Also of caches that compute a part of the prompt for its own."""
        if self._forwards or cache is not (self._cache or cache):
            return
        self._cache, self._forward_began = cache, now()
        cache.computed_by(self.call.origin)
        self._lookup, self._past = cache.lookup.last, cache.stored_tokens
        self._look()

    def forward_ended(self, cache: PagedCache) -> None:
        """A forward was completed."""
        if cache is not self._cache:
            return
        self._forwards += 1
        if self._forwards == 1:
            self._first_token_time = now()
            self._tell_prefilled(cache)
        if self._forwards % cache.pool.block_size == 1:  # rows have filled a block since the last look
            self._look()

    def ended(self, output_tokens: int, error: BaseException | None = None) -> None:
        """generate() is over."""
        self._look()
        memory, size = self._memory, self._block_bytes
        generation_events.emit(
            GenerationEnded(
                call=self.call, first_token_time=self._first_token_time, forwards=self._forwards,
                output_tokens=output_tokens, peak_blocks=memory.peak_blocks, peak_bytes=memory.peak_blocks * size,
                shared_bytes=memory.shared_blocks * size, byte_seconds=memory.block_seconds * size, error=error,
            )
        )  # fmt: skip

    @_harmless
    def _look(self) -> None:
        if self._cache is not None:
            self._cache.look_at_memory(self._memory)
            self._block_bytes = self._cache.pool.storage.block_bytes

    @_harmless
    def _tell_prefilled(self, cache: PagedCache) -> None:
        lookup = cache.lookup.last
        found = lookup.found(cache.pool) if lookup is not None and lookup is not self._lookup else Found()
        generation_events.emit(
            GenerationPrefilled(call=self.call, began=self._forward_began, past=self._past, **found._asdict())
        )  # fmt: skip


def _generate(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    named = named_arguments(args, kwargs)
    recording = _recording(model, named)
    if recording is None:
        return original(model, *args, **kwargs)
    token = _current.set(recording)
    try:
        generation_events.emit(GenerationBegan(call=recording.call, time=recording.call.began))
        output = original(model, *args, **kwargs)
        tokens = _harmless(count_new_tokens)(model, output, named) or 0
    except BaseException as error:
        recording.ended(0, error)
        raise
    finally:
        _current.reset(token)
    recording.ended(tokens)
    return output


@_harmless
def _recording(model: PreTrainedModel, kwargs: dict[str, Any]) -> Recording | None:
    """None for a call without a PagedCache."""
    from hfpaged.cache import PagedCache
    from hfpaged.patching import is_default

    given = kwargs.get("cache", kwargs.get("past_key_values"))
    cache = given if isinstance(given, PagedCache) else None
    if cache is None and (given is not None or not is_default(model) or wants_no_paged_cache(model, kwargs)):
        return None
    rows, tokens = row_count(kwargs), prompt_tokens(kwargs)
    name = compat.model_name(model)
    call = GenerationCall(
        model_name=name, rows=rows, prompt_tokens=tokens, settings=settings(model, kwargs),
        kv_format=cache.pool.kv_format.title if cache is not None else "auto", origin=Origin(f"generate {name}"),
    )  # fmt: skip
    return Recording(call, cache)


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A generate() that tells of its calls as long as it is the one in use: others may hold on to it for ever."""

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if generate is not _in_use:
            return original(self, *args, **kwargs)
        return _generate(original, self, *args, **kwargs)

    return generate


def _sync() -> None:
    """Wrap generate() while somebody watches. What others have wrapped around it meanwhile is left alone."""
    global _in_use
    with _lock:
        if generation_events.is_watched():
            if _in_use is None:
                _in_use = GenerationMixin.generate = _wrapping(GenerationMixin.generate)
        elif _in_use is not None:
            if GenerationMixin.generate is _in_use:
                GenerationMixin.generate = _in_use.__wrapped__
            _in_use = None


generation_events.listeners.append(_sync)
_sync()
