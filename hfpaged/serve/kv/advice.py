"""What the doctor says of a running batcher, asked anew only now and then."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from hfpaged.clock import now
from hfpaged.engine.batcher import ContinuousBatcher

EVERY_SECONDS = 5.0  # what is wrong with a server changes in minutes


class Advice:
    """The last diagnosis. It is made in the thread of whoever asks, so that nothing is done while nobody looks."""

    def __init__(self, batcher: ContinuousBatcher) -> None:
        self._batcher = batcher
        self._lock = threading.Lock()
        self._made_at = float("-inf")
        self._record: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        """As JSON gets it, at most EVERY_SECONDS old."""
        with self._lock:
            if now() - self._made_at >= EVERY_SECONDS:
                self._record, self._made_at = self._ask(), now()
            return {**self._record, "age_seconds": now() - self._made_at}

    def _ask(self) -> dict[str, Any]:
        diagnosis = self._batcher.diagnose()
        return {
            "verdict": diagnosis.verdict,
            "is_sure": diagnosis.is_sure,
            "findings": [asdict(finding) for finding in diagnosis],
            "notes": [asdict(finding) for finding in diagnosis.notes],
        }
