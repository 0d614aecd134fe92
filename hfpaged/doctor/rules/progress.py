"""Whether steps are made at all."""

from __future__ import annotations

from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import duration, plural

# A step takes milliseconds to a few seconds; of the slowest ones that were seen it may take so many times more.
QUIET_SECONDS = 30.0
QUIET_STEPS = 20.0
# The first one compiles kernels, and may read weights from a disk.
FIRST_STEP = 180.0


def no_progress(reading: Reading) -> Finding | None:
    """Requests are there and no step ends."""
    running, waiting = reading.total("hfpaged_requests_running"), reading.total("hfpaged_requests_waiting")
    if running + waiting == 0:
        return None
    since = reading.largest("hfpaged_stalled_seconds")
    slowest = reading.histogram("hfpaged_step_duration_seconds").quantile(0.99)
    if since < (FIRST_STEP if slowest is None else max(QUIET_SECONDS, QUIET_STEPS * slowest)):
        return None
    evidence = (
        f"{plural(running, 'request')} running and {plural(waiting, 'request')} waiting, and for "
        f"{duration(since)} an engine that has some has ended no step"
        + ("" if slowest is None else f"; 99 % of the steps before took at most {duration(slowest)}")
    )
    remedy = (
        "see that somebody calls step() or holds batcher.running(); if so, a step hangs: running(step_timeout=) tells "
        "of it in the log, and `py-spy dump --pid PID` shows where"
    )
    return Finding("problem", "No progress: no step ends", evidence, remedy)
