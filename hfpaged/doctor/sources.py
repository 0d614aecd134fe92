"""Where metrics come from: a URL, a file, standard input."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException

from hfpaged.doctor.exposition import Exposition, parse, short
from hfpaged.errors import MetricsError

TIMEOUT = 10.0  # seconds, as Prometheus itself waits
MOST_BYTES = 64 * 2**20  # a scrape is a few hundred KiB
PIECE = 2**16
ACCEPT = "text/plain;version=0.0.4;q=1,*/*;q=0.1"


def is_url(source: str) -> bool:
    """ "http://..." or "host:port"."""
    host, colon, rest = source.partition(":")
    port = rest.partition("/")[0]
    return "://" in source or bool(host and colon and port.isdigit() and not os.path.exists(source))


def scrape(source: str, timeout: float = TIMEOUT) -> Exposition:
    """A URL with or without /metrics, a file, or - for standard input. Raises MetricsError."""
    if is_url(source):
        return _scrape_url(source, timeout)
    if source == "-":
        return _parse(getattr(sys.stdin, "buffer", sys.stdin).read(MOST_BYTES + 1), "standard input")
    try:
        with open(source, "rb") as file:
            return _parse(file.read(MOST_BYTES + 1), source)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise MetricsError(
            f"{source!r} is no URL and cannot be read as a file ({getattr(error, 'strerror', error)}); give "
            "http://HOST:PORT, a file or -"
        ) from error


def _parse(body: str | bytes, name: str) -> Exposition:
    if len(body) > MOST_BYTES:
        raise MetricsError(f"{name} has more than {MOST_BYTES:,} bytes, which is no scrape of one process")
    try:
        text = body.decode() if isinstance(body, bytes) else body
    except UnicodeDecodeError as error:
        raise MetricsError(f"{name} is no text; give what /metrics of a process answers") from error
    return parse(text, name)


def _scrape_url(source: str, timeout: float) -> Exposition:
    url = source if "://" in source else f"http://{source}"
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise MetricsError(f"{source} is no address ({error}); give http://HOST:PORT or https://...") from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise MetricsError(f"{source} cannot be asked; give http://HOST:PORT or https://...")
    if "@" in parts.netloc:  # it must not stand in what is printed
        host = parts.netloc.rpartition("@")[2]
        raise MetricsError(f"a password for {host} is not sent; use curl -u USER https://... | hfpaged doctor -")
    if parts.path.rstrip("/").endswith("/metrics"):
        return _ask(url, timeout)
    with_path = parts._replace(path=f"{parts.path.rstrip('/')}/metrics").geturl()
    try:
        return _ask(with_path, timeout)
    except MetricsError:
        if parts.path.strip("/"):  # another name than /metrics, given in full
            return _ask(url, timeout)
        raise


def _ask(url: str, timeout: float) -> Exposition:
    try:
        body = _body(url, timeout)
    except urllib.error.HTTPError as error:
        raise MetricsError(
            f"{url} answers {error.code} {short(str(error.reason))}; give the address of /metrics of the process that "
            "runs hfpaged"
        ) from error
    except (OSError, ValueError, HTTPException) as error:  # refused, no such host, a timeout, no HTTP
        reason = short(str(getattr(error, "reason", error)))
        raise MetricsError(f"{url} does not answer within {timeout:g} s: {reason}; is the process up?") from error
    return _parse(body, url)


def _body(url: str, timeout: float) -> bytes:
    """Read until it is all there, too much, or too late: each piece may come in time, and the whole never."""
    request = urllib.request.Request(url, headers={"Accept": ACCEPT, "User-Agent": "hfpaged-doctor"})
    body, until = bytearray(), time.monotonic() + timeout
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        while len(body) <= MOST_BYTES and (piece := answer.read1(PIECE)):
            body += piece
            if time.monotonic() > until:
                raise TimeoutError(f"only {len(body):,} bytes have come")
        if answer.length and len(body) <= MOST_BYTES:
            raise ConnectionError(f"the answer ends {answer.length:,} bytes too early")
    return bytes(body)


def scrape_twice(source: str, interval: float, timeout: float = TIMEOUT) -> tuple[Exposition, Exposition, float]:
    """Two scrapes of a URL and the seconds between them. Raises MetricsError."""
    first = scrape(source, timeout)
    began = time.monotonic()
    time.sleep(interval)
    return first, scrape(source, timeout), time.monotonic() - began
