"""A real Prometheus scrapes a real batcher, answers the dashboard's queries and fires the shipped alert."""

from __future__ import annotations

import shlex
import urllib.request
from contextlib import contextmanager

import prometheus_client
import prometheus_server
import pytest
import shipped
import tiny_models
import torch
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import until
from test_batcher_tokens import prompts
from test_shipped import NOT_SHOWN

import hfpaged
from hfpaged import ContinuousBatcher, PagedCache, cli
from hfpaged.errors import RequestTooLongError
from hfpaged.telemetry import _prometheus
from hfpaged.telemetry.catalog import BY_NAME

pytestmark = [shipped.needs("prometheus"), pytest.mark.usefixtures("one_thread")]

# What work() is there for; without it a query might find nothing but zeros.
HAPPENED = (
    "hfpaged_preemptions_total",
    "hfpaged_preempted_tokens_total",
    "hfpaged_prefix_hit_tokens_total",
    "hfpaged_kv_evicted_blocks_total",
    'hfpaged_requests_finished_total{finish_reason="error"}',
    "hfpaged_requests_aborted_total",
    'hfpaged_requests_rejected_total{reason="too_long"}',
    'hfpaged_generate_calls_total{outcome="error"}',
    "hfpaged_dense_fallbacks_total",
    "hfpaged_shadow_tokens_total",
    'hfpaged_kv_swapped_blocks_total{direction="out"}',
)
MODEL, SHADOWED = "shipped/tiny-llama", "shipped/tiny-llama-int8"
GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module")
def metrics_url():
    """What this process measures, over HTTP."""
    registry = prometheus_client.CollectorRegistry()
    undo = _prometheus.install(registry)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()
    undo()


@pytest.fixture(scope="module")
def prometheus(metrics_url, tmp_path_factory):
    with prometheus_server.running(tmp_path_factory.mktemp("prometheus"), metrics_url) as prometheus:
        until(lambda: [target["health"] for target in prometheus.targets()] == ["up"])
        yield prometheus


@contextmanager
def batcher_of(name, **more):
    """Of a model with a name of its own, whose pool nobody adds to. Six prompts of 9 tokens and what they are answered
    do not fit in at once.
    """
    model = tiny_models.make("llama")
    model.config.name_or_path = name
    sizes = {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 32, "max_num_seqs": 8, "prepack": False}
    with ContinuousBatcher(model, **sizes, **more) as batcher:
        yield batcher
    hfpaged.unpatch(model)


@pytest.fixture
def batcher():
    with batcher_of(MODEL) as batcher:
        yield batcher


@pytest.fixture
def shadowed(tmp_path):
    tiers = {"swap_space": "1MiB", "prefix_store": tmp_path / "store"}
    with (
        batcher_of(SHADOWED, kv_dtype="int8", shadow=1.0, **tiers) as batcher,
        hfpaged.kv_events.publish(batcher, "tcp://127.0.0.1:*"),
    ):
        yield batcher


def raises(*_):
    raise ZeroDivisionError


def work(batcher):
    """Some of all that is counted."""
    batcher.generate([*prompts((9, 9, 9, 9, 9, 9)), prompts((9,))[0]], max_new_tokens=20, do_sample=False)
    assert batcher.generate([[5, 6, 7]], logits_processor=[raises], **GREEDY)[0].finish_reason == "error"
    assert batcher.abort(batcher.add_request([5, 6, 7], **GREEDY))
    batcher.step()
    with pytest.raises(RequestTooLongError):
        batcher.add_request(list(range(90)), **GREEDY)
    while batcher.loop.work_spare():
        continue
    generate(batcher.model, batcher.pool)


def generate(model, pool):
    """Calls of generate(): one that ends, one on the dense path, one that fails."""
    ids = torch.tensor(prompts((9,)))
    model.generate(ids, past_key_values=PagedCache(model, pool=pool), **GREEDY)
    model.generate(
        ids,
        past_key_values=PagedCache(model, pool=pool),
        output_attentions=True,
        return_dict_in_generate=True,
        **GREEDY,
    )
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, past_key_values=PagedCache(model, pool=pool), logits_processor=[raises], **GREEDY)


def scraped_series(metrics_url):
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name for family in families for sample in family.samples}


def test_what_the_dashboard_and_the_alerts_ask_for_is_scraped(prometheus, metrics_url, shadowed):
    work(shadowed)
    until(lambda: [target["health"] for target in prometheus.targets()] == ["up"])
    assert [target["labels"]["instance"] for target in prometheus.targets()] == [metrics_url]
    series = scraped_series(metrics_url)
    expressions = [expression for _, _, expression in shipped.queries()] + [rule["expr"] for rule in shipped.rules()]
    asked = {shipped.name_of(found) for expression in expressions for found in shipped.selectors(expression)}
    assert asked - shipped.OF_PROMETHEUS - set(shipped.recorded()) <= series
    assert {shipped.metric_of(name).name for name in series} | set(NOT_SHOWN) == set(BY_NAME)
    until(lambda: series <= set(prometheus.get("label/__name__/values")))


def test_every_query_of_the_dashboard_is_answered(prometheus, metrics_url, shadowed):
    work(shadowed)
    calls = f'hfpaged_generate_calls_total{{model_name="{SHADOWED}"}}'
    until(lambda: prometheus.query(f"{calls} > 0"))
    work(shadowed)
    until(lambda: prometheus.query(f"rate({calls}[30s]) > 0"))
    for series in HAPPENED:
        until(lambda series=series: prometheus.query(f"{series} > 0"), series)
    for title, _, expression in shipped.queries(__rate_interval="1m", model_name=SHADOWED, instance=metrics_url):
        until(lambda asked=expression: prometheus.query(asked), f"{title}: {expression} finds something")


def drawn(prometheus, *titles):
    """The values of all series of these panels, of our model."""
    queries = {title: expression for title, _, expression in shipped.queries(model_name=MODEL)}
    return [float(series["value"][1]) for title in titles for series in prometheus.query(queries[title])]


def diagnosed(description, capsys):
    """What the command says that an alert ends with."""
    program, *words = shlex.split(description.rpartition("Diagnose: ")[2])
    assert program == "hfpaged"
    assert cli.main([*words, "--model-name", MODEL]) == 1
    return capsys.readouterr().out


def test_the_alert_for_a_full_pool_fires_and_ends(prometheus, metrics_url, batcher, capsys):
    def firing():
        return [alert for alert in prometheus.firing("HfpagedKVPoolFull") if alert["labels"]["model_name"] == MODEL]

    assert not firing()
    names = [batcher.add_request(prompts((74,), seed)[0], **GREEDY) for seed in range(3)]
    while batcher.pool.num_free > 1:
        batcher.step()
    (alert,) = until(firing)
    notes = alert["annotations"]
    assert notes["summary"] == f"The KV pool of {MODEL} is 95% full"
    assert "now 95% (requests waiting: 2)" in notes["description"]
    assert notes["description"].endswith(f"hfpaged doctor http://{metrics_url}/metrics")
    assert float(alert["value"]) == pytest.approx(0.95)
    until(lambda: drawn(prometheus, "KV usage", "Running", "Waiting") == [pytest.approx(0.95), 1, 2])
    until(lambda: sorted(drawn(prometheus, "Blocks by state")) == [0, 0, 1, 19])
    assert "The KV pool is full" in diagnosed(notes["description"], capsys)
    for name in names:
        batcher.abort(name)
    until(lambda: not firing())
    groups = prometheus.get("rules")["groups"]
    assert {(rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]} == {("ok", "")}
    assert {rule["name"] for group in groups for rule in group["rules"]} == {*shipped.alerts(), *shipped.recorded()}
