"""What handlers work with: the engine behind one server. It starts and stops with the application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerBase

from hfpaged.compat import model_name
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.call import Call, Submission
from hfpaged.engine.running import RunningEngine
from hfpaged.errors import QueueFullError
from hfpaged.kv_events.publishing import publishing
from hfpaged.serve.callers import Caller, KeyRing
from hfpaged.serve.deadline import Deadline, stopping
from hfpaged.serve.grammar_processor import warm_up_grammars
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.metrics import watching
from hfpaged.serve.options import BYTES_OF_TOKEN, MIN_BODY_BYTES, ServeOptions, check_names
from hfpaged.serve.recording import recording

logger = logging.getLogger("hfpaged")

STEP_SECONDS = 300.0  # a step that takes longer hangs: /health says so
LAST_WORDS = 2.0  # seconds for telling those who are cut short
NOT_STARTED = "this application has not been started: whoever mounts it enters its lifespan, see build_app"


class Service:
    """One batcher, and how it is served.

    engine        None before the start and after the end
    is_draining   no request is taken any more
    is_warm       the first forwards, which compile kernels, have been made
    """

    engine: RunningEngine | None = None
    is_draining = is_warm = False

    def __init__(self, batcher: ContinuousBatcher, options: ServeOptions) -> None:
        self.batcher, self.options = batcher, options
        self.keys = KeyRing(options.api_keys, options.salt_secret)
        self.registry, self.created = CollectorRegistry(), int(time.time())
        self._num_answers = 0
        check_names(self.model_names, options.adapters)
        self._stopped = asyncio.Event()  # the time of those who have not ended is over

    @property
    def model_names(self) -> tuple[str, ...]:
        """Those of the model itself, the first of which is told in answers."""
        return self.options.served_model_names or (model_name(self.batcher.model),)

    @property
    def max_body_bytes(self) -> int:
        """Of one request."""
        longest = self.batcher.limits.get("max_model_len", 0)
        return self.options.max_body_bytes or max(MIN_BODY_BYTES, BYTES_OF_TOKEN * longest)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ApiError 422 where the batcher has none."""
        if self.batcher.tokenizer is None:
            raise ApiError(422, "this server has no tokenizer: send token ids to /v1/completions", code="no_tokenizer")
        return self.batcher.tokenizer

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request chooses by its `model`, None for the model itself. Raises ApiError 404."""
        if model is None or model in self.model_names:
            return None
        if model in self.options.adapters:
            return model
        known = ", ".join((*self.model_names, *self.options.adapters))
        raise ApiError(404, f"there is no model {model!r} here; use one of: {known}", code="model_not_found",
                       param="model")  # fmt: skip

    async def begin(self, prepare: Callable[[], Iterable[Submission]], caller: Caller) -> Call:
        """Let requests of a caller wait for the engine: all or none. `prepare` runs in a thread, and says which; tenant
        and salt are put in here (of its settings "cache_salt" is the client's own). Whoever gets the call closes it.

        Raises what `prepare` and `ContinuousBatcher.add_request` raise, and ApiError 503 while the server stops.
        """
        if self.is_draining:
            raise stopping()
        if self.engine is None:
            raise ApiError(503, NOT_STARTED, code="not_started")
        self.batcher.check_queue(caller.tenant)  # before the prompt is read, which waits for a thread

        def owned() -> Iterable[Submission]:
            for prompt, settings in prepare():
                rest = dict(settings)
                salt = self.keys.salt(caller, rest.pop("cache_salt", None))
                yield Submission(prompt, {**rest, "tenant": caller.tenant, "salt": salt})

        return await self.engine.begin(owned)

    def deadline(self) -> Deadline:
        """Of a request that begins now."""
        return Deadline(self.options.request_timeout, self._stopped)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A client is being answered: the server does not end meanwhile."""
        self._num_answers += 1
        try:
            yield
        finally:
            self._num_answers -= 1

    def why_not_ready(self) -> ApiError | None:
        """Why a load balancer should send its requests elsewhere, None where it should not."""
        if self.is_draining:
            return stopping()
        if self.engine is None:
            return ApiError(503, NOT_STARTED, code="not_started")
        if not self.engine.is_healthy:
            return ApiError(503, "the engine makes no steps", code="engine_dead")
        if not self.is_warm:
            return ApiError(503, "the first forwards, which compile kernels, are under way", code="warming_up")
        try:
            self.batcher.check_queue()
        except QueueFullError as error:
            return ApiError(503, str(error), code="queue_full")
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine's thread, between start and end of the application."""
        self.is_draining, self.is_warm = False, False
        self._stopped = asyncio.Event()
        async with self._followed(), self.batcher.running(step_timeout=STEP_SECONDS) as self.engine:
            warming = asyncio.ensure_future(self._warm_up())
            try:
                with watching(self.registry, self.options.metrics_compat):
                    yield
            finally:
                await self.drain()
                await asyncio.gather(warming, return_exceptions=True)
                self.engine = None

    @asynccontextmanager
    async def _followed(self) -> AsyncIterator[None]:
        with recording(self.options.record, self.batcher), publishing(self.options.kv_events, self.batcher):
            yield

    async def drain(self, is_over: Callable[[], bool] = bool) -> None:
        """Take no more requests, and let those under way end until `shutdown_timeout` seconds are over, or `is_over`
        says so; the others are told, and aborted.
        """
        self.is_draining = True
        if not self._stopped.is_set():
            await self._until_answered(self.options.shutdown_timeout, is_over)
        self._stopped.set()
        await self._until_answered(LAST_WORDS, lambda: False)

    async def _until_answered(self, seconds: float, is_over: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while self._num_answers and time.monotonic() < end and not is_over():
            await asyncio.sleep(0.02)

    async def _warm_up(self) -> None:
        try:
            await asyncio.to_thread(self.batcher.warm_up)
            await asyncio.to_thread(warm_up_grammars, self.batcher.tokenizer, self.batcher.model)
        except Exception:  # requests will tell
            logger.exception("the first forwards failed")
        self.is_warm = True
