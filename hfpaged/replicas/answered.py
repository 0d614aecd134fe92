"""What a replica sends back of a request that was sent to all of them."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import Message

REPLICA = b"x-hfpaged-replica"  # of an answer: who gave it


class Answered(NamedTuple):
    """One replica's whole answer."""

    replica: str
    messages: list[Message]
