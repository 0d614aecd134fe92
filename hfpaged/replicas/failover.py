"""What becomes of a request whose replica is lost: another one answers it as long as its client has seen nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

from starlette.types import Message, Send

from hfpaged.serve.event_stream import event
from hfpaged.serve.http_errors import ApiError

logger = logging.getLogger("hfpaged")

MOST_TRIES = 8
MOST_DEATHS = 3  # of replicas that had a request: it may be what ends them, and would end all the others
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds, doubled from one try to the next: 7 s in all

Ask = Callable[[], AsyncIterator[list[Message]]]
Test = Callable[[BaseException], bool]


class Failover:
    """`ask` begins one call of a replica, whichever the router finds best, and gives the messages of its answer;
    `is_lost` tells errors of a replica that is there no more from those of its answer, `has_died` those of one that has
    ended from those of one that cannot be reached.
    """

    def __init__(self, ask: Ask, is_lost: Test, has_died: Test) -> None:
        self._ask, self._is_lost, self._has_died = ask, is_lost, has_died

    async def answer(self, send: Send) -> None:
        """Give an answer to a client, whose first byte goes out when there is one of its body: nothing of an answer
        that breaks off before then is seen, and it is asked for again. Behind that byte nothing is asked for twice: a
        stream of events ends with an error event.

        Raises ApiError 503 where no replica has answered in 8 tries, or 3 have died of it, and what a replica raises.
        """
        pause, deaths = FIRST_PAUSE, 0
        for tries in range(1, MOST_TRIES + 1):
            answer = _Answer(send)
            try:
                async with aclosing(cast(Any, self._ask())) as parts:
                    async for messages in parts:
                        await answer.add(messages)
            except Exception as error:
                if not self._is_lost(error):
                    raise
                deaths += self._has_died(error)
                logger.warning("a replica was lost while it answered (try %d): %s", tries, _first_line(error))
            if answer.is_whole:
                return
            if answer.has_begun:
                await answer.break_off()
                return
            if deaths == MOST_DEATHS:
                raise ended_replicas(deaths)
            if tries < MOST_TRIES:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        raise no_replica()


class _Answer:
    """As far as a client has seen it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self.has_begun = self.is_whole = False

    async def add(self, messages: list[Message]) -> None:
        """Passes on, and keeps the head of an answer until there is something of its body."""
        for message in messages:
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if not self.has_begun and self._head is not None:
                self.has_begun = True
                await self._send(self._head)
            await self._send(message)
            self.is_whole = not message.get("more_body", False)

    async def break_off(self) -> None:
        """Raises ApiError for what is no stream of events: there is no place for words in it."""
        assert self._head is not None
        if not _is_event_stream(self._head):
            raise replica_lost()
        await self._send({"type": "http.response.body", "body": event(replica_lost().body), "more_body": False})


def _is_event_stream(head: Message) -> bool:
    kind: bytes = next((value for name, value in head["headers"] if name.lower() == b"content-type"), b"")
    return kind.startswith(b"text/event-stream")


def replica_lost() -> ApiError:
    """In the middle of an answer."""
    return ApiError(
        503, "the replica that gave this answer was lost, and the answer breaks off here; send the request again",
        code="replica_lost",
    )  # fmt: skip


def no_replica() -> ApiError:
    """Before the beginning of an answer."""
    return ApiError(503, "no replica of the model answers now; send the request again later", code="no_replica")


def ended_replicas(count: int) -> ApiError:
    """One after the other has died with a request."""
    return ApiError(
        503, f"{count} replicas have died while they had this request, which may be why, and no other one is given it; "
        "their logs say more", code="replica_lost",
    )  # fmt: skip


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
