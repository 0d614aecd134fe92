"""All metrics for OpenTelemetry: the histograms of its conventions, and the gauges and counters of the catalog."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry.metrics import MeterProvider, NoOpMeter, get_meter_provider

from hfpaged import __version__, generation_events
from hfpaged.engine import registry
from hfpaged.telemetry.generate_tally import GENERATE
from hfpaged.telemetry.observables import Observables
from hfpaged.telemetry.server_histograms import ServerHistograms


class Instruments(NamedTuple):
    """All of one meter provider."""

    histograms: ServerHistograms
    observables: Observables


# Instruments are made once for a provider, and cannot be taken back.
_made: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


def install(meter_provider: MeterProvider | None = None) -> Callable[[], None]:
    """Record and observe all metrics with this provider, None: the global one; returns what undoes it.

    With one that does nothing, nothing is done.
    """
    provider = get_meter_provider() if meter_provider is None else meter_provider
    meter = provider.get_meter("hfpaged", __version__)
    if isinstance(meter, NoOpMeter):  # that of an SDK which is switched off, too
        return lambda: None
    if provider not in _made:
        _made[provider] = Instruments(ServerHistograms(meter), Observables(meter))
    instruments = _made[provider]
    instruments.observables.is_on = True
    maker, hook = instruments.histograms.hook_for, instruments.histograms.generate_hook
    registry.watch(maker)
    generation_events.watch(hook)
    GENERATE.watch()

    def undo() -> None:
        instruments.observables.is_on = False
        registry.unwatch(maker)
        generation_events.unwatch(hook)
        GENERATE.unwatch()

    return undo
