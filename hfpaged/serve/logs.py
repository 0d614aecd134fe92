"""What the server logs, on stderr: lines for people, or an object a line for those who collect them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone

LOGGERS = ("hfpaged", "uvicorn")
# Libraries whose loggers have handlers of their own; all others hand their records to the root.
OTHERS = ("", "transformers", "huggingface_hub", "torch")


@contextmanager
def logging_to_stderr(level: str, *, as_json: bool) -> Iterator[None]:
    """Meanwhile these loggers, and those below them, write there and nowhere else. As JSON so do all others, at the
    levels that they have, and Python's warnings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    with ExitStack() as stack:
        for name in LOGGERS:
            stack.enter_context(_written_by(handler, logging.getLogger(name), level.upper()))
        # Its start and its end are told by us; what it says of errors is not.
        uvicorn = logging.getLogger("uvicorn.error")
        stack.callback(uvicorn.setLevel, uvicorn.level)
        uvicorn.setLevel(max(logging.WARNING, logging.getLogger("hfpaged").level))
        if as_json:
            for name in OTHERS:
                stack.enter_context(_written_by(handler, logging.getLogger(name)))
            stack.enter_context(_captured_warnings())
        yield


@contextmanager
def _written_by(handler: logging.Handler, logger: logging.Logger, level: str | None = None) -> Iterator[None]:
    before = logger.level, logger.propagate, logger.handlers[:]
    if level is not None:
        logger.setLevel(level)
    logger.propagate, logger.handlers = False, [handler]
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate, logger.handlers = before[1:]


@contextmanager
def _captured_warnings() -> Iterator[None]:
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)


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
