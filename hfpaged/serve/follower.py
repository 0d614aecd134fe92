"""The ranks of a served model that do not serve: they compute what rank 0 has them compute, and end when it does."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.errors import RankLostError
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.tensor_parallel import ranks_of

QUIET = ("warning", "error")  # levels at which one rank says no more than what only it knows
logger = logging.getLogger("hfpaged")


def follows(model: Any, is_split: bool) -> bool:
    """Whether this process serves nobody: it has a part of the model, and is not rank 0."""
    if isinstance(model, nn.Module):
        ranks = ranks_of(model)
        return ranks is not None and not ranks.is_first
    return is_split and os.environ["RANK"] != "0"


@contextmanager
def quiet_logging(level: str, *, as_json: bool) -> Iterator[None]:
    """What rank 0 says is not said again; faults are."""
    with logging_to_stderr(level if level in QUIET else QUIET[0], as_json=as_json):
        yield


def follow(batcher: ContinuousBatcher) -> int:
    """Until rank 0 has let its last request end: 0; 1 where the group is lost."""
    with _signals_are_for_rank_0():
        try:
            batcher.follow()
        except RankLostError:  # said in the log
            return 1
    return 0


@contextmanager
def _signals_are_for_rank_0() -> Iterator[None]:
    """torchrun tells all ranks to stop, and requests that are under way need all of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
