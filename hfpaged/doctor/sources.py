"""Where metrics come from: a URL, a file, standard input."""

from __future__ import annotations

import email.utils
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

from hfpaged.clock import now
from hfpaged.doctor.exposition import Exposition, parse
from hfpaged.errors import MetricsError

TIMEOUT = 10.0  # seconds, as Prometheus itself waits
MOST_BYTES = 64 * 2**20  # a scrape is a few hundred KiB
ACCEPT = "text/plain;version=0.0.4;q=1,*/*;q=0.1"


class Scrape(NamedTuple):
    """`clock` is that of who answered, None where nobody knows when it was taken."""

    exposition: Exposition
    clock: float | None


def is_url(source: str) -> bool:
    """ "http://..." or "host:port"."""
    host, colon, rest = source.partition(":")
    port = rest.partition("/")[0]
    return "://" in source or bool(host and colon and port.isdigit() and not Path(source).exists())


def scrape(source: str, timeout: float = TIMEOUT) -> Scrape:
    """A URL with or without /metrics, a file, or - for standard input. Raises MetricsError."""
    if is_url(source):
        return _scrape_url(source, timeout)
    text = sys.stdin.read() if source == "-" else _read_file(source)
    name = "standard input" if source == "-" else source
    return Scrape(parse(text, name), now() if source == "-" else None)


def _read_file(source: str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise MetricsError(
            f"{source!r} is no URL and cannot be read as a file ({error.strerror}); give http://HOST:PORT, a file or -"
        ) from error
    except UnicodeDecodeError as error:
        raise MetricsError(f"{source} is no text; give what /metrics of a process answers") from error


def _scrape_url(source: str, timeout: float) -> Scrape:
    url = source if "://" in source else f"http://{source}"
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise MetricsError(f"{source} cannot be asked; give http://HOST:PORT or https://...")
    if parts.path.rstrip("/").endswith("/metrics"):
        return _ask(url, timeout)
    with_path = parts._replace(path=f"{parts.path.rstrip('/')}/metrics").geturl()
    try:
        return _ask(with_path, timeout)
    except MetricsError:
        if parts.path.strip("/"):  # another name than /metrics, given in full
            return _ask(url, timeout)
        raise


def _ask(url: str, timeout: float) -> Scrape:
    request = urllib.request.Request(url, headers={"Accept": ACCEPT, "User-Agent": "hfpaged-doctor"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            body = answer.read(MOST_BYTES + 1)
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        raise MetricsError(
            f"{url} answers {error.code} {error.reason}; give the address of /metrics of the process that runs hfpaged"
        ) from error
    except (OSError, ValueError) as error:  # refused, no such host, a timeout, a broken answer
        reason = getattr(error, "reason", error)
        raise MetricsError(f"{url} does not answer within {timeout:g} s: {reason}; is the process up?") from error
    if len(body) > MOST_BYTES:
        raise MetricsError(f"{url} answers more than {MOST_BYTES:,} bytes, which is no scrape of one process")
    return Scrape(parse(body.decode("utf-8", "replace"), url), _clock(date))


def _clock(date: str | None) -> float:
    """Of the answer's header, else ours."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() if date else now()
    except ValueError:
        return now()


def scrape_twice(source: str, interval: float, timeout: float = TIMEOUT) -> tuple[Scrape, Scrape, float]:
    """Two scrapes of a URL and the seconds between them. Raises MetricsError."""
    first = scrape(source, timeout)
    began = time.monotonic()
    time.sleep(interval)
    return first, scrape(source, timeout), time.monotonic() - began
