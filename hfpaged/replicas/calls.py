"""Calls of replicas through Ray Serve: of the one that the router finds best, or of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message, Scope

from hfpaged.replicas.answered import Answered
from hfpaged.replicas.failover import no_replica
from hfpaged.serve.http_errors import ApiError

ALL_SECONDS = 20.0  # that all replicas together have to answer
# That those have who are slower than others: who looks at all of them, Prometheus say, waits for 10.
LATE_SECONDS = 8.0

# What of a scope a replica sees: the rest lives in this process.
_SENT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
         "client", "server")  # fmt: skip


class ReplicaCalls:
    """`handle` is Ray Serve's for the deployment of Replica."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)

    async def ask(self, scope: Scope, body: bytes, prefix_hashes: bytes) -> AsyncIterator[list[Message]]:
        """One replica's answer as it is made. Closing this early aborts the request there."""
        response = self._answers.remote(_sent(scope), body, prefix_hashes=prefix_hashes)
        is_over = False
        try:
            async for messages in response:
                yield messages
            is_over = True
        finally:
            if not is_over:
                response.cancel()

    async def ask_all(
        self, scope: Scope, body: bytes, only: str | None = None, *, enough: Callable[[Answered], bool] | None = None,
        strict: bool = False,
    ) -> list[Answered]:  # fmt: skip
        """The whole answers of all replicas, or of the one that is named, in the order of their names; those that came
        first, up to one that is `enough`. Of one that is silent there is none; with `strict` it is told.

        Raises ApiError 503 where there is none, and where it is told.
        """
        if only is not None:  # the others give none
            enough = _is_there
        found = await self._of_all("answer_whole", _sent(scope), body, only, enough=enough, strict=strict)
        return sorted((answer for answer in found if answer is not None), key=lambda answer: answer.replica)

    async def rows(self) -> list[dict[str, Any]]:
        """What each replica does now, in the order of their names. Raises ApiError 503 where there is none."""
        return sorted(await self._of_all("row"), key=lambda row: row["replica"])

    async def facts(self) -> dict[str, Any]:
        """What one replica, whichever, says of itself; the others are like it."""
        found: dict[str, Any] = await self._handle.facts.remote()
        return found

    async def _of_all(
        self, method: str, *args: Any, enough: Callable[[Any], bool] | None = None, strict: bool = False
    ) -> list[Any]:
        answers: list[Any] = []
        began, pending = time.monotonic(), await self._asked(method, *args)
        try:
            while pending and not (enough and any(enough(each) for each in answers)):
                seconds = LATE_SECONDS if answers and not strict else ALL_SECONDS
                left = max(began + seconds - time.monotonic(), 0)
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                answers += [task.result() for task in done if not is_lost(task.exception())]
        finally:
            for task in pending:
                task.cancel()
        if not answers:
            raise no_replica()
        if strict and pending:
            raise silent(len(pending))
        return answers

    async def _asked(self, method: str, *args: Any) -> set[asyncio.Future[Any]]:
        """What comes from each replica. Ray Serve's own way to wait for all has nothing where one of them is silent."""
        response = self._handle.broadcast(method, *args)
        try:
            results = await asyncio.wait_for(response._fetch_replica_results_async(), ALL_SECONDS)
        except (DeploymentUnavailableError, asyncio.TimeoutError):
            raise no_replica() from None
        return {asyncio.ensure_future(each.get_async()) for each in results}


def _is_there(answer: Answered | None) -> bool:
    return answer is not None


def silent(count: int) -> ApiError:
    """Of what has to reach all of them."""
    return ApiError(
        503, f"{count} of the replicas did not answer in {ALL_SECONDS:g} s, and all of them are meant; the others have "
        "done it: send the request again later", code="replica_silent",
    )  # fmt: skip


def is_lost(error: Any) -> bool:
    """Whether an error says that a replica is there no more, or cannot be reached; not one of its own."""
    if isinstance(error, DeploymentUnavailableError):
        return True
    return isinstance(error, RayError) and not isinstance(error, RayTaskError | TaskCancelledError)


def has_died(error: BaseException) -> bool:
    """Whether the process of a replica has ended."""
    return isinstance(error, ActorDiedError)


def _sent(scope: Scope) -> Scope:
    return {name: scope[name] for name in _SENT if name in scope}
