"""An answer whose replica is lost: before its first byte another one gives it, behind it an error event ends it."""

import asyncio
import json

import pytest

from hfpaged.replicas import failover
from hfpaged.replicas.failover import MOST_DEATHS, MOST_TRIES, Failover
from hfpaged.serve.http_errors import ApiError

EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
JSON = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


class LostError(Exception):
    pass


class DiedError(LostError):
    pass


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


class Replicas:
    """Each call plays the next script: batches of messages, and an error at last if there is one."""

    def __init__(self, *scripts):
        self.scripts, self.calls, self.closed = list(scripts), 0, 0

    async def ask(self):
        script = self.scripts[min(self.calls, len(self.scripts) - 1)]
        self.calls += 1
        try:
            for each in script:
                await asyncio.sleep(0)
                if isinstance(each, BaseException):
                    raise each
                yield each
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(failover, "FIRST_PAUSE", 0.0)


def answered(replicas):
    """What the client gets."""
    sent = []

    async def send(message):
        sent.append(message)

    is_lost, has_died = (lambda error, kind=kind: isinstance(error, kind) for kind in (LostError, DiedError))
    asyncio.run(Failover(replicas.ask, is_lost, has_died).answer(send))
    return sent


WHOLE = [[EVENTS], [part(b"data: 1\n\n")], [part(b"", more=False)]]


@pytest.mark.parametrize(
    "first",
    [
        [LostError()],
        [[EVENTS], LostError()],  # the head is held back
        [[EVENTS]],  # it ends without a word
        [],
    ],
    ids=["at once", "behind the head", "short", "empty"],
)
def test_an_answer_that_no_byte_of_was_seen_of_is_given_by_another_replica(first):
    replicas = Replicas(first, WHOLE)
    assert answered(replicas) == [message for batch in WHOLE for message in batch]
    assert replicas.calls == replicas.closed == 2


@pytest.mark.parametrize("end", [[LostError("gone")], []], ids=["an error", "no more messages"])
def test_a_stream_that_has_begun_ends_with_an_error_event_and_is_not_asked_for_again(end):
    replicas = Replicas([[EVENTS], [part(b"data: 1\n\n")], *end], WHOLE)
    head, begun, last = answered(replicas)
    assert (head, begun) == (EVENTS, part(b"data: 1\n\n"))
    assert last["more_body"] is False
    assert last["body"].startswith(b"data: ")
    assert last["body"].endswith(b"\n\n")
    told = json.loads(last["body"].removeprefix(b"data: "))["error"]
    assert told["code"] == "replica_lost"
    assert told["type"] == "service_unavailable_error"
    assert replicas.calls == 1


def test_an_answer_that_is_no_stream_breaks_off_as_an_error():
    with pytest.raises(ApiError) as caught:
        answered(Replicas([[JSON, part(b"{")], LostError()], WHOLE))
    assert caught.value.code == "replica_lost"


def test_a_whole_answer_stands_even_where_its_replica_is_lost_right_behind_it():
    replicas = Replicas([[JSON, part(b"{}", more=False)], LostError()])
    assert answered(replicas) == [JSON, part(b"{}", more=False)]
    assert replicas.calls == 1


def test_when_no_replica_answers_it_is_said_after_so_many_tries():
    replicas = Replicas([LostError()])
    with pytest.raises(ApiError) as caught:
        answered(replicas)
    assert (caught.value.status, caught.value.code) == (503, "no_replica")
    assert caught.value.headers["Retry-After"]
    assert replicas.calls == MOST_TRIES


def test_a_request_that_replicas_die_of_is_not_given_to_all_of_them():
    replicas = Replicas([DiedError()])
    with pytest.raises(ApiError, match="3 replicas have died while they had this request") as caught:
        answered(replicas)
    assert (caught.value.status, caught.value.code) == (503, "replica_lost")
    assert replicas.calls == MOST_DEATHS
    twice = Replicas([DiedError()], [[EVENTS], DiedError()], [LostError()], WHOLE)
    assert answered(twice) == [message for batch in WHOLE for message in batch]


def test_what_a_replica_raises_itself_is_not_tried_again():
    replicas = Replicas([ZeroDivisionError("its own")], WHOLE)
    with pytest.raises(ZeroDivisionError):
        answered(replicas)
    assert replicas.calls == 1


def test_a_client_who_goes_closes_the_call():
    replicas = Replicas([[EVENTS], [part(b"data: 1\n\n")], [part(b"data: 2\n\n")]])

    async def go():
        seen = asyncio.Event()

        async def send(message):
            seen.set()
            await asyncio.sleep(60)

        answering = asyncio.ensure_future(Failover(replicas.ask, lambda _: False, lambda _: False).answer(send))
        await seen.wait()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)

    asyncio.run(go())
    assert (replicas.calls, replicas.closed) == (1, 1)
