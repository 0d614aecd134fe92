"""What the server logs, on stderr: lines for people, or an object a line for those who collect them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

LOGGERS = ("hfpaged", "uvicorn")


@contextmanager
def logging_to_stderr(level: str, *, as_json: bool) -> Iterator[None]:
    """Meanwhile these loggers, and those below them, write there and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    for logger in loggers:
        logger.setLevel(level.upper())
        logger.propagate, logger.handlers = False, [handler]
    # Its start and its end are told by us; what it says of errors is not.
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn_level = uvicorn.level
    uvicorn.setLevel(max(logging.WARNING, loggers[0].level))
    try:
        yield
    finally:
        uvicorn.setLevel(uvicorn_level)
        for logger, (old_level, propagates, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(old_level)
            logger.propagate, logger.handlers = propagates, handlers


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and what the record has as `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)
