"""Calls of all replicas, through a handle that is none."""

import asyncio

import pytest

pytest.importorskip("ray.serve")

from ray.exceptions import RayActorError

from hfpaged.replicas import calls
from hfpaged.replicas.answered import Answered
from hfpaged.replicas.calls import ReplicaCalls
from hfpaged.serve.http_errors import ApiError

SCOPE = {"type": "http", "path": "/health"}


class Replica:
    """Gives an answer, or none where another one is meant, raises an error, or is silent."""

    def __init__(self, name, status):
        self.name, self.status = name, status
        self.is_asked_in_vain = False

    async def get_async(self):
        if self.status is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.is_asked_in_vain = True
        if isinstance(self.status, BaseException):
            raise self.status
        if not self.is_meant:
            return None
        return Answered(self.name, [{"type": "http.response.start", "status": self.status, "headers": []}])


class Handle:
    def __init__(self, *replicas):
        self.replicas = replicas

    def options(self, **_):
        return self

    def broadcast(self, method, scope, body, only):
        self.only = only
        return self

    async def _fetch_replica_results_async(self):
        for each in self.replicas:
            each.is_meant = self.only in (None, each.name)
        return self.replicas


def asked(*statuses, **how):
    replicas = [Replica(f"r{number}", status) for number, status in enumerate(statuses)]
    found = asyncio.run(ReplicaCalls(Handle(*replicas)).ask_all(SCOPE, b"", **how))
    assert all(each.is_asked_in_vain for each in replicas if each.status is None)
    return [answer.replica for answer in found]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(calls, "ALL_SECONDS", 0.2)


LOST = RayActorError()


def test_of_a_silent_replica_there_is_no_answer_and_of_the_others_there_is():
    assert asked(200, None, 503, LOST) == ["r0", "r2"]


def test_one_answer_may_be_enough(monkeypatch):
    monkeypatch.setattr(calls, "LATE_SECONDS", 1000.0)
    monkeypatch.setattr(calls, "ALL_SECONDS", 1000.0)
    assert "r1" in asked(None, 200, enough=lambda answer: answer.messages[0]["status"] == 200)


def test_the_one_that_is_named_does_not_wait_for_others(monkeypatch):
    monkeypatch.setattr(calls, "LATE_SECONDS", 1000.0)
    monkeypatch.setattr(calls, "ALL_SECONDS", 1000.0)
    assert asked(None, None, 200, only="r2") == ["r2"]


def test_where_all_are_meant_a_silent_one_is_told():
    assert asked(200, LOST, strict=True) == ["r0"]
    with pytest.raises(ApiError, match="1 of the replicas did not answer"):
        asked(200, None, strict=True)


@pytest.mark.parametrize("statuses", [(), (LOST,), (None,), (None, LOST)])
def test_where_nobody_answers_it_is_said(statuses):
    with pytest.raises(ApiError, match="no replica"):
        asked(*statuses)


def test_what_a_replica_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        asked(200, ZeroDivisionError())
