"""The clients of `hfpaged bench serve`, all in one process of their own that does as little as can be: it sends, and
keeps the bytes that come with the time of each piece. Whoever started it reads them afterwards.

    python -m hfpaged.bench.serve_client < plan > pieces     both JSON, see `play`
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hfpaged.bench.endpoint import EndpointError
from hfpaged.bench.serve_answers import Answer, read_answer

PATIENCE = 3600.0  # seconds for all of them


class Send(NamedTuple):
    """One request: `at` seconds after the start."""

    at: float
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Played:
    """The answers in the order of the requests; `cpu_seconds` that the clients took."""

    answers: list[Answer]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max(answer.end for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.answers]


def play(
    url: str, sends: Sequence[Send], headers: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> Played:
    """POST each body to `url` at its time, and read its stream of events. Raises EndpointError for an answer that is an
    error, or none, and where they take more than `patience` seconds.
    """
    parts = urlsplit(url)
    plan = {
        "host": parts.hostname,
        "port": parts.port or (443 if parts.scheme == "https" else 80),
        "tls": parts.scheme == "https",
        "sends": [[send.at, _request(parts.path, parts.netloc, send.body, headers or {})] for send in sends],
    }
    command = [sys.executable, "-m", "hfpaged.bench.serve_client"]
    try:
        done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired as error:
        raise EndpointError(f"{url} has not answered all {len(sends)} requests in {patience:g} s") from error
    if done.returncode:
        raise EndpointError(f"the clients of {url} failed: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout)
    return Played([read_answer(sent, pieces) for sent, pieces in found["answers"]], found["cpu_seconds"])


def _request(path: str, host: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    data = json.dumps(body)  # ASCII, so that characters are bytes
    fields = {
        "Host": host, "Connection": "close", "Content-Type": "application/json", "Content-Length": len(data), **headers
    }  # fmt: skip
    return f"POST {path} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in fields.items()) + f"\r\n{data}"


class _Stream(asyncio.Protocol):
    """One connection, from its request to its end."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request, self._ended = request, ended
        self.pieces: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set_result(None)


async def _play(plan: Mapping[str, Any]) -> list[tuple[float, list[tuple[float, str]]]]:
    start = time.perf_counter()
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if plan["tls"] else None

    async def one(at: float, request: str) -> tuple[float, list[tuple[float, str]]]:
        await asyncio.sleep(at - (time.perf_counter() - start))
        sent, ended = time.perf_counter(), loop.create_future()
        stream = _Stream(request.encode(), ended)
        await loop.create_connection(lambda: stream, plan["host"], plan["port"], ssl=context)
        await ended
        return sent, [(when, data.decode("latin-1")) for when, data in stream.pieces]

    return await asyncio.gather(*(one(at, request) for at, request in plan["sends"]))


def main() -> None:
    """Answers: for each request when it was sent, and (time, bytes as latin-1) of each piece of what came."""
    answers = asyncio.run(_play(json.load(sys.stdin)))
    json.dump({"answers": answers, "cpu_seconds": time.process_time()}, sys.stdout)


if __name__ == "__main__":
    main()
