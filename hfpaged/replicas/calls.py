"""Calls of replicas through Ray Serve: of the one that the router finds best, or of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message, Scope

from hfpaged.replicas.failover import no_replica
from hfpaged.replicas.replica import Answered

ALL_SECONDS = 20.0  # that all replicas together have to answer

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

    async def ask_all(self, scope: Scope, body: bytes, only: str | None = None) -> list[Answered]:
        """The whole answers of all replicas, or of the one that is named, in the order of their names. Raises ApiError
        503 where there is none.
        """
        found = await self._of_all("answer_whole", _sent(scope), body, only)
        return sorted((answer for answer in found if answer is not None), key=lambda answer: answer.replica)

    async def rows(self) -> list[dict[str, Any]]:
        """What each replica does now, in the order of their names. Raises ApiError 503 where there is none."""
        return sorted(await self._of_all("row"), key=lambda row: row["replica"])

    async def facts(self) -> dict[str, Any]:
        """What one replica, whichever, says of itself; the others are like it."""
        found: dict[str, Any] = await self._handle.facts.remote()
        return found

    async def _of_all(self, method: str, *args: Any) -> list[Any]:
        try:
            found = await self._handle.broadcast(method, *args).results_async(
                timeout_s=ALL_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            raise no_replica() from None
        answers = [answer for answer in found if not is_lost(answer)]
        if not answers:
            raise no_replica()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


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
