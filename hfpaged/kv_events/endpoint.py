"""Addresses of ZMQ sockets: whose they are, and who can reach them."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from hfpaged.errors import InvalidConfigError

_TCP = re.compile(r"tcp://(\[[^\[\]]+\]|[^\s/:\[\]]+|::):(\d+|\*)")
_ANY = ("*", "::", "0.0.0.0")


class Endpoint(NamedTuple):
    """tcp://HOST:PORT, or ipc://FILE; port "*" is a free one."""

    scheme: str
    host: str  # without brackets; a path where the scheme is ipc
    port: str  # "" where the scheme is ipc

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Raises InvalidConfigError."""
        match = _TCP.fullmatch(text)
        if match and (match[2] == "*" or int(match[2]) <= 65535):
            return cls("tcp", match[1].strip("[]"), "*" if match[2] == "0" else match[2])
        if text.startswith("ipc://") and len(text) > len("ipc://"):
            return cls("ipc", text.removeprefix("ipc://"), "")
        raise InvalidConfigError(
            f"{text!r} is no endpoint; write tcp://127.0.0.1:5557, tcp://*:5557 for other machines, or ipc:///run/FILE"
        )

    @property
    def is_here(self) -> bool:
        """Whether it is an address of this machine, to bind, and not of another one, to connect to."""
        if self.is_private or self.host in _ANY:
            return True
        import psutil

        own = {found.address.partition("%")[0] for all_of in psutil.net_if_addrs().values() for found in all_of}
        return self.host.partition("%")[0] in own

    @property
    def is_private(self) -> bool:
        """Whether nobody on another machine sees what goes there."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:  # a name, which may lead anywhere
            return False

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        # A name that has several addresses is bound as the one that clients try first.
        host = "127.0.0.1" if self.host == "localhost" else self.host
        return f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}"
