"""What a start tells on the terminal, or in the log: what takes long, and when and where the server is ready."""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from hfpaged.serve.options import ServeOptions

logger = logging.getLogger("hfpaged")


def url_of(host: str, port: int) -> str:
    """Of a server that listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warn_if_open(options: ServeOptions, host: str, url: str) -> None:
    """Say so where other machines are let in without a key."""
    if not options.api_keys and not _is_loopback(host):
        logger.warning("%s can be reached from other machines, and without an API key everybody is let in", url)


def _is_loopback(host: str) -> bool:
    """What a name stands for on another machine is not known here."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def tell_ready(url: str, console: Console, log_json: bool) -> None:
    """Of a server that takes requests now."""
    if log_json:
        logger.info("ready: %s", url, extra={"fields": {"url": url}})
    else:
        console.print(f"ready: {url}/v1 for clients, {url}/ to look at it; Ctrl-C to stop", soft_wrap=True)
        sys.stdout.flush()


@contextmanager
def progress(words: str, console: Console, log_json: bool) -> Iterator[None]:
    """A clock on a terminal, a line elsewhere."""
    if log_json:
        logger.info(words)
        yield
    elif console.is_terminal:
        with console.status(f"{words} ..."):
            yield
    else:
        console.print(f"{words} ...")
        sys.stdout.flush()
        yield
