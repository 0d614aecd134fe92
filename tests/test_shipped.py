"""What is shipped for Grafana, Prometheus and Jaeger is whole, and asks for what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import get_args

import promql_parser
import pytest
import shipped
from hatchling.builders.wheel import WheelBuilder

from hfpaged.engine.waits import Cause
from hfpaged.telemetry import conventions
from hfpaged.telemetry.catalog import METRICS
from hfpaged.telemetry.exporting import SHIPPED, export, read_shipped

ROOT = Path(__file__).parent.parent

# Metrics that the dashboard does not show, each with its reason.
NOT_SHOWN: dict[str, str] = {}

UNITS = {"short", "percentunit", "s", "bytes", "reqps", "ops", "si:B·s"}
DOCTOR = re.compile(r"Diagnose: hfpaged doctor http://\{\{ \$labels\.instance \}\}/metrics$")


# What is shipped


def test_a_wheel_has_all_that_is_shipped_and_nothing_else_beside_it():
    files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    folder = "hfpaged/telemetry/shipped/"
    assert {path.removeprefix(folder) for path in files if path.startswith(folder)} == set(SHIPPED)
    assert {file.name for file in (ROOT / folder).iterdir()} == set(SHIPPED)


# The dashboard


def test_grafana_can_import_the_dashboard():
    board = shipped.dashboard()
    assert board["schemaVersion"] >= 38  # of Grafana 10
    assert (board["title"], board["uid"]) == ("hfpaged", "hfpaged")
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "model_name", "instance"]
    assert board["templating"]["list"][0]["query"] == "prometheus"
    assert "id" not in board, "the id of one installation's database"


def test_panels_have_ids_of_their_own():
    ids = [panel["id"] for panel in shipped.dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_lie_beside_each_other():
    def cells(panel):
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        return {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}

    for one, other in combinations(shipped.dashboard()["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


@pytest.mark.parametrize("panel", shipped.panels(), ids=lambda panel: panel["title"])
def test_a_panel_says_in_a_sentence_what_is_bad_and_has_a_unit_and_the_chosen_data_source(panel):
    assert re.fullmatch(r"[A-Z][^.]*([a-z]\.[a-z(][^.]*)*\.", panel["description"]), "one sentence"
    assert len(panel["description"]) > 60
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources(panel))
    defaults = panel["fieldConfig"]["defaults"]
    unit = panel["options"]["yAxis"]["unit"] if panel["type"] == "heatmap" else defaults.get("unit")
    assert unit in UNITS or panel["type"] == "table"


def sources(panel):
    return [panel["datasource"], *(target["datasource"] for target in panel["targets"])]


def test_titles_stand_once_in_a_row():
    seen, row = set(), None
    for panel in shipped.dashboard()["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        assert (row, panel["title"], panel["type"]) not in seen
        seen.add((row, panel["title"], panel["type"]))


@pytest.mark.parametrize(
    ("legend", "expression"),
    [pytest.param(legend, query, id=f"{title}: {legend}") for title, legend, query in shipped.queries()],
)
def test_a_query_parses_and_asks_for_what_there_is(legend, expression):
    assert "$" not in expression
    check_selectors(expression)
    kept = shipped.grouping(expression)
    if kept is None:
        kept = set.union(*(shipped.labels_of(shipped.name_of(found)) for found in shipped.selectors(expression)))
    assert set(re.findall(r"{{(\w+)}}", legend)) <= kept


def check_selectors(expression):
    """Names and labels are of the catalog; counters are asked for over a time, gauges are not."""
    found = shipped.nodes(expression)
    ranges = [shipped.name_of(node.vector_selector) for node in found if isinstance(node, promql_parser.MatrixSelector)]
    for selector in shipped.selectors(expression):
        series = shipped.name_of(selector)
        if series in shipped.OF_PROMETHEUS or series in shipped.recorded():
            continue
        metric = shipped.metric_of(series)
        assert metric is not None, f"{series} is not in the catalog"
        assert {matcher.name for matcher in selector.matchers.matchers} <= shipped.labels_of(series)
        assert (metric.kind in ("counter", "histogram")) == (series in ranges) or over_time(expression, series), series
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr):
            inner = shipped.selectors(node.expr.prettify())
            known = set.union(*(shipped.labels_of(shipped.name_of(selector)) for selector in inner))
            assert set(node.modifier.labels) <= known


def over_time(expression, series):
    """Functions of gauges over a time."""
    return re.search(rf"\b(deriv|changes)\({series}\b", expression)


def test_every_metric_is_on_the_dashboard_or_there_is_a_reason():
    shown = {
        shipped.metric_of(shipped.name_of(selector)).name
        for _, _, expression in shipped.queries()
        for selector in shipped.selectors(expression)
    }
    assert shown | set(NOT_SHOWN) == {metric.name for metric in METRICS}
    assert not shown & set(NOT_SHOWN)


def test_variables_and_annotations_ask_for_what_there_is():
    board = shipped.dashboard()
    for variable in board["templating"]["list"][1:]:
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()
        (selector,) = shipped.selectors(shipped.filled(series))
        names = shipped.name_of(selector).split("|")
        assert all(label in shipped.labels_of(name) for name in names)
        assert variable["query"]["query"] == variable["definition"]
    (annotation,) = board["annotations"]["list"]
    (selector,) = shipped.selectors(annotation["expr"])
    assert shipped.name_of(selector) == "ALERTS"


def test_the_dashboard_is_as_grafana_writes_it():
    assert read_shipped("grafana-dashboard.json").decode() == (
        json.dumps(shipped.dashboard(), indent=2, ensure_ascii=False) + "\n"
    )


# Alerts


@pytest.mark.parametrize("name", shipped.recorded())
def test_a_recording_rule_asks_for_what_there_is(name):
    check_selectors(shipped.recorded()[name])


@pytest.mark.parametrize("name", shipped.alerts())
def test_an_alert_says_figures_and_the_command_that_says_more(name):
    rule = shipped.alerts()[name]
    check_selectors(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "for" in rule
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description"}
    assert "{{" in notes["summary"]
    assert re.search(r"\d|\$value", notes["description"])
    assert DOCTOR.search(notes["description"])
    for expression in re.findall(r'printf "([^"]+%q[^"]+)"', notes["description"]):
        check_selectors(expression.replace("%q", '"x"'))


def test_each_alert_is_tested_beyond_its_bound_and_below_it():
    cases = [case for test in shipped.yaml_of("alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    for name in shipped.alerts():
        fires = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == name]
        assert set(fires) == {True, False}, name
    assert {case["alertname"] for case in cases} == set(shipped.alerts())
    for test in shipped.yaml_of("alerts_test.yml")["tests"]:
        assert any("under:9464" in series["series"] for series in test["input_series"]), test["name"]


@shipped.needs("promtool")
@pytest.mark.parametrize(
    "line", ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"]
)
def test_promtool_passes_what_was_written_out(line, tmp_path):
    export(tmp_path)
    done = subprocess.run(["promtool", *line.split()], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@shipped.needs("promtool")
def test_promtool_fails_where_a_bound_is_another(tmp_path):
    export(tmp_path)
    bound, text = "hfpaged_kv_usage_ratio > 0.9\n", shipped.text_of("alerts.yml")
    assert bound in text
    (tmp_path / "alerts.yml").write_text(text.replace(bound, bound.replace("0.9", "0.8")))
    words = ["promtool", "test", "rules", "alerts_test.yml"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=False).returncode == 1


# The programs around it


def test_containers_are_of_one_version_each_and_open_to_this_machine_alone():
    services = shipped.yaml_of("compose.yml")["services"]
    for service in services.values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {"127.0.0.1:4317:4317", "127.0.0.1:4318:4318"} <= set(services["jaeger"]["ports"])
    assert services["jaeger"]["image"] in shipped.text_of("traces.md")


def test_containers_find_the_files_and_each_other():
    services = shipped.yaml_of("compose.yml")["services"]
    volumes = [volume for service in services.values() for volume in service.get("volumes", ())]
    mounts = [volume.split(":") for volume in volumes if volume.startswith("./")]
    assert {source.removeprefix("./") for source, _, _ in mounts} <= set(SHIPPED)
    inside = {source.removeprefix("./"): target for source, target, _ in mounts}
    (provider,) = shipped.yaml_of("grafana-provider.yml")["providers"]
    assert inside["grafana-dashboard.json"].startswith(provider["options"]["path"] + "/")
    for source in shipped.yaml_of("grafana-datasources.yml")["datasources"]:
        assert re.match(r"http://(\w+):", source["url"])[1] in services
    (rule_file,) = shipped.yaml_of("prometheus.yml")["rule_files"]
    assert inside["alerts.yml"] == str(Path(inside["prometheus.yml"]).parent / rule_file)
    (job,) = shipped.yaml_of("prometheus.yml")["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}}' in shipped.alerts()["HfpagedDown"]["expr"]


# The page on traces


def named_attributes(page):
    """All attributes in backticks; ".b" stands for what the last whole name has in place of its end."""
    whole = ""
    for name in re.findall(r"`((?:gen_ai|hfpaged)?\.?[a-z_.]*\.[a-z_]+)`", page):
        whole = whole.rpartition(".")[0] + name if name.startswith(".") else name
        if whole.startswith(("gen_ai.", "hfpaged.")) and not whole.startswith("hfpaged.telemetry"):
            yield whole


def test_the_page_on_traces_names_attributes_that_spans_have():
    known = {value for name, value in vars(conventions).items() if name.isupper()}
    known |= {conventions.WAIT + cause for cause in get_args(Cause)}
    named = set(named_attributes(shipped.text_of("traces.md")))
    assert len(named) > 20
    assert named <= known
    assert {conventions.WAIT + cause for cause in get_args(Cause)} <= named
    spans = {conventions.QUEUE_SPAN, conventions.PREFILL_SPAN, conventions.DECODE_SPAN}
    events = {conventions.FIRST_TOKEN_EVENT, conventions.PREEMPTED_EVENT}
    assert all(f"`{name}`" in shipped.text_of("traces.md") for name in spans | events)


def test_the_python_of_the_page_on_traces_switches_them_on():
    (code,) = re.findall(r"```python\n(.*?)```", shipped.text_of("traces.md"), re.DOTALL)
    check = "from hfpaged.telemetry.instrumenting import is_instrumented\nassert is_instrumented()\n"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
