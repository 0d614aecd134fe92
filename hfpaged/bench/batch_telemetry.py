"""Rows telemetry and telemetry-no-sdk: what spans and metrics take of a run of many requests.

Their part of the time is that of all hooks, which run inside of the steps. Runs with and without them take turns too:
the difference has all that goes on beside the steps in it, and the noise of the machine.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from prometheus_client import CollectorRegistry, generate_latest

from hfpaged import telemetry
from hfpaged.bench.batch_ours import batcher_of, greedy
from hfpaged.bench.batch_static import first_runs
from hfpaged.bench.batch_throughput import POOL, warm_up
from hfpaged.bench.batch_workload import Run, Workload, mixed
from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import not_measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.turns import in_a_row
from hfpaged.engine.events import Event, Hook
from hfpaged.measure import in_turn
from hfpaged.telemetry.instrumenting import is_instrumented

SCRAPE_SECONDS = 1.0  # Prometheus asks every 15 or 60

Switch = Callable[[], AbstractContextManager[object]]


def with_sdk(setting: Setting, shape: Shape) -> Measured:
    """The value is the part of a run that hooks take: spans that are exported to nowhere, metrics that are scraped."""
    return _measured(setting, shape, _sdk)


def without_sdk(setting: Setting, shape: Shape) -> Measured:
    """The same for somebody who has called `instrument` and configured nothing."""
    return _measured(setting, shape, _no_sdk)


def _measured(setting: Setting, shape: Shape, switch: Switch) -> Measured:
    if is_instrumented():
        return not_measured("telemetry is on for this whole process; unset the OTEL_* variables")
    workload = mixed(setting, shape)
    warm_up(setting, workload)
    plain: list[Run] = []
    watched: list[Run] = []
    shares: list[float] = []
    for number in range(setting.repeats):
        sides: list[tuple[list[Run], Switch]] = [(plain, nullcontext), (watched, switch)]
        for runs, side in in_turn(number, sides):
            made, share = _run(setting, workload, side)
            runs.append(made)
            if runs is watched:
                shares.append(share)
    slow, fast = (statistics.median(run.speed for run in runs) for runs in (plain, watched))
    judges = first_runs(setting, shape).values()
    same = all(run.rows == plain[0].rows for run in (*plain, *watched, *judges))
    speeds = f"{fast:.1f} tok/s with, {slow:.1f} without: {100 * (fast / slow - 1):+.1f} %"
    return in_a_row(shares, same, f"hooks take {100 * statistics.median(shares):.3f} %; {speeds}")


def _run(setting: Setting, workload: Workload, switch: Switch) -> tuple[Run, float]:
    """A run, and the part of it that hooks took."""
    with switch(), batcher_of(setting, POOL) as batcher:
        watch = _Stopwatch()
        batcher.hooks[:] = [watch.timed(hook) for hook in batcher.hooks]
        start = time.perf_counter()
        outputs = batcher.generate(workload.prompts, generation_config=greedy(workload))
        setting.synchronize()
        seconds = time.perf_counter() - start
    return Run([output.token_ids for output in outputs], seconds), watch.seconds / seconds


@contextmanager
def _sdk() -> Iterator[None]:
    """Spans go through the SDK's batches to nowhere, all metrics are written out each second."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from hfpaged.bench.span_sink import SpanSink

    registry, spans, metrics = CollectorRegistry(), TracerProvider(), MeterProvider([InMemoryMetricReader()])
    spans.add_span_processor(BatchSpanProcessor(SpanSink()))
    telemetry.instrument(spans, metrics, registry)
    stop = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(registry, stop), daemon=True)
    scraper.start()
    try:
        yield
    finally:
        stop.set()
        scraper.join()
        telemetry.uninstrument()
        spans.shutdown()
        metrics.shutdown()


def _scrape(registry: CollectorRegistry, stop: threading.Event) -> None:
    while not stop.wait(SCRAPE_SECONDS):
        generate_latest(registry)


@contextmanager
def _no_sdk() -> Iterator[None]:
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.trace import NoOpTracerProvider

    telemetry.instrument(NoOpTracerProvider(), NoOpMeterProvider(), CollectorRegistry())
    try:
        yield
    finally:
        telemetry.uninstrument()


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, hook: Hook) -> Hook:
        def run(event: Event) -> None:
            began = time.perf_counter()
            hook(event)
            self.seconds += time.perf_counter() - began

        return run
