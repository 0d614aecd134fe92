"""What handlers work with: the engine behind one server. It starts and stops with the application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from transformers import PreTrainedTokenizerBase

from hfpaged.compat import model_name
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.call import Call, Submission
from hfpaged.engine.running import RunningEngine
from hfpaged.serve.callers import Caller, KeyRing
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.options import ServeOptions


class Service:
    """One batcher, and how it is served.

    engine        None before the start and after the end
    is_draining   no request is taken any more
    is_warm       the first steps, which compile kernels, have been made
    """

    def __init__(self, batcher: ContinuousBatcher, options: ServeOptions) -> None:
        self.batcher, self.options = batcher, options
        self.keys = KeyRing(options.api_keys, options.salt_secret)
        self.engine: RunningEngine | None = None
        self.is_draining = self.is_warm = False
        self.created = int(time.time())

    @property
    def model_names(self) -> tuple[str, ...]:
        """Those of the model itself, the first of which is told in answers."""
        return self.options.served_model_names or (model_name(self.batcher.model),)

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
        if self.engine is None or self.is_draining:
            raise ApiError(503, "this server is stopping or has not started; try another one", code="shutting_down")

        def owned() -> Iterable[Submission]:
            for prompt, settings in prepare():
                rest = dict(settings)
                salt = self.keys.salt(caller, rest.pop("cache_salt", None))
                yield Submission(prompt, {**rest, "tenant": caller.tenant, "salt": salt})

        return await self.engine.begin(owned)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine's thread, between start and end of the application."""
        async with self.batcher.running() as engine:
            self.engine = engine
            try:
                yield
            finally:
                self.engine = None
