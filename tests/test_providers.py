"""Providers from OTEL_* variables, and the command line under them."""

from __future__ import annotations

import logging
import os
import threading
import types

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.trace import TracerProvider

from hfpaged import cli
from hfpaged.errors import InvalidConfigError
from hfpaged.telemetry import delivery_log, instrumenting, providers


@pytest.fixture(autouse=True)
def environment():
    """Without any OTEL_* variable. All is as it was afterwards, also what our own code has set meanwhile."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


ASKED = [
    ({}, False),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4317"}, True),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here:4317"}, True),
    ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://here:4317"}, True),
    ({"OTEL_TRACES_EXPORTER": "console"}, True),
    ({"OTEL_METRICS_EXPORTER": "otlp"}, True),
    ({"OTEL_CONFIG_FILE": "otel.yaml"}, True),
    ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": " None "}, False),
    ({"OTEL_SERVICE_NAME": "mine", "OTEL_TRACES_SAMPLER": "always_on"}, False),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4317", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4317", "OTEL_SDK_DISABLED": "no"}, True),
]


@pytest.mark.parametrize(("variables", "expected"), ASKED, ids=[" ".join(variables) for variables, _ in ASKED])
def test_a_receiver_is_what_asks_for_providers(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert providers.are_asked_for() is expected


def test_nothing_is_installed_that_nobody_asked_for():
    providers.install_providers()()
    with providers.observed():
        assert not instrumenting.is_instrumented()
    assert "opentelemetry.sdk" not in type(trace.get_tracer_provider()).__module__
    assert "opentelemetry.sdk" not in type(metrics.get_meter_provider()).__module__


@pytest.mark.parametrize("own", [(TracerProvider(), None), (None, TracerProvider())], ids=["tracer", "meter"])
def test_providers_that_somebody_has_set_are_left_alone(monkeypatch, own):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    found = [mine or theirs for mine, theirs in zip(own, providers._global_providers(), strict=True)]
    monkeypatch.setattr(providers, "_global_providers", lambda: tuple(found))
    monkeypatch.setattr(providers, "_configure", lambda name: pytest.fail("it configures"))
    providers.install_providers()()


def test_the_exporter_is_otlp_where_an_endpoint_is_set_and_no_exporter(monkeypatch):
    seen = []
    monkeypatch.setattr(providers, "_configure", seen.append)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://here:4317")
    providers.install_providers("mine")()
    assert (os.environ.get("OTEL_TRACES_EXPORTER"), os.environ["OTEL_METRICS_EXPORTER"]) == (None, "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://here:4317")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    providers.install_providers()()
    assert (os.environ["OTEL_TRACES_EXPORTER"], os.environ["OTEL_METRICS_EXPORTER"]) == ("otlp", "none")
    assert seen == ["mine", "hfpaged"]


NAMED = [
    ({}, {"service.name": "ours"}),
    ({"OTEL_SERVICE_NAME": "mine"}, None),
    ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=mine"}, None),
    ({"OTEL_RESOURCE_ATTRIBUTES": "a=b"}, {"service.name": "ours"}),
]


@pytest.mark.parametrize(("variables", "expected"), NAMED)
def test_the_name_of_the_service_is_the_environments_or_ours(monkeypatch, variables, expected):
    seen = []
    monkeypatch.setattr("opentelemetry.sdk._configuration._initialize_components", lambda **given: seen.append(given))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    providers._configure("ours")
    assert seen == [{} if expected is None else {"resource_attributes": expected}]


def test_an_exporter_that_is_not_installed_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://here:4317")
    monkeypatch.setattr("opentelemetry.sdk._configuration.entry_points", lambda **names: ())
    with pytest.raises(InvalidConfigError, match=r"pip install 'hfpaged\[otlp\]'"):
        providers.install_providers()
    assert logging.getLogger("opentelemetry").propagate


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}],
)
def test_the_command_line_says_what_cannot_be_asked_for(monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    use(monkeypatch, "demo", lambda args: pytest.fail("it runs"))
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpaged: error: the OTEL_* variables ask for what is not there:")
    assert "name otlp, console or none" in line


def use(monkeypatch, name, run):
    """This as the run() of a command."""
    command = types.SimpleNamespace(add_parser=lambda subparsers: subparsers.add_parser(name), run=run)
    monkeypatch.setitem(cli.sys.modules, cli._HOME_OF.get(name, f"hfpaged.{name}"), command)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_commands_that_run_models_are_observed_and_deliver_at_their_end(monkeypatch, name):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    seen = []
    monkeypatch.setattr(providers, "install_providers", lambda name: lambda: seen.append("delivered"))
    use(monkeypatch, name, lambda args: seen.append(instrumenting.is_instrumented()) or 0)
    assert cli.main([name]) == 0
    assert seen == ([True, "delivered"] if name in cli.OBSERVED else [False])
    assert not instrumenting.is_instrumented()


def test_what_is_there_is_delivered_after_ctrl_c_too(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    seen = []
    monkeypatch.setattr(providers, "install_providers", lambda name: lambda: seen.append("delivered"))
    use(monkeypatch, "demo", run)
    assert cli.main(["demo"]) == 130
    assert seen == ["delivered"]
    assert not instrumenting.is_instrumented()


def test_who_is_instrumented_already_stays_so(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(providers, "install_providers", lambda name: lambda: None)
    instrumenting.instrument()
    with providers.observed():
        pass
    assert instrumenting.is_instrumented()
    instrumenting.uninstrument()


def test_shutting_down_waits_for_nobody_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(providers, "FLUSH_SECONDS", 0.2)
    stop, done = threading.Event(), []
    hangs = types.SimpleNamespace(shutdown=stop.wait)
    works = types.SimpleNamespace(shutdown=lambda: done.append("delivered"))
    assert providers.shut_down(hangs, works, hangs) is False  # and comes back at all: one that waited never would
    assert done == ["delivered"]
    stop.set()
    assert providers.shut_down(works, object()) is True


def test_one_kind_of_warning_is_said_once_and_others_are_kept(caplog):
    undo = delivery_log.say_once()
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    sdk = logging.getLogger("opentelemetry.sdk._configuration")
    for number in range(3):
        exporter.warning("no answer from %s", number)
        logging.getLogger("opentelemetry.sdk._shared_internal").warning("Queue full, dropping %s.", "Span")
        exporter.info("nothing to say")
        sdk.warning("no sampler of this name")
        sdk.warning(f"value {number} is out of range")  # words that are others each time are kept nowhere
    undo()
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert said == [
        ("hfpaged", "telemetry is not delivered, and this is said once: no answer from 0"),
        ("hfpaged", "no sampler of this name"),
        ("hfpaged", "value 0 is out of range"),
    ]
    exporter.warning("again")
    assert caplog.records[-1].name == exporter.name
