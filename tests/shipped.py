"""The shipped dashboard and rules, taken apart for the tests that look at them."""

from __future__ import annotations

import json
import re
import shutil

import promql_parser
import pytest
import yaml

from hfpaged.telemetry.catalog import BY_NAME
from hfpaged.telemetry.exporting import read_shipped

# Grafana fills these in.
VARIABLES = {"$model_name": ".*", "$instance": ".*", "$__rate_interval": "1m"}
# What Prometheus itself gives to all that it scrapes.
TARGET_LABELS = {"job", "instance"}
OF_PROMETHEUS = {"up", "ALERTS"}

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


def needs(program):
    """A mark for tests that run one of Prometheus's own programs."""
    reason = f"no {program}: apt-get install -y --no-install-recommends prometheus"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def text_of(name):
    return read_shipped(name).decode()


def yaml_of(name):
    return yaml.safe_load(text_of(name))


def dashboard():
    return json.loads(text_of("grafana-dashboard.json"))


def panels():
    """Those that draw something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def filled(expression, **variables):
    for name, value in (VARIABLES | {f"${name}": value for name, value in variables.items()}).items():
        expression = expression.replace(name, value)
    return expression


def queries(**variables):
    """(panel, legend, expression) of the dashboard."""
    return [
        (panel["title"], target["legendFormat"], filled(target["expr"], **variables))
        for panel in panels()
        for target in panel["targets"]
    ]


def rules():
    return [rule for group in yaml_of("alerts.yml")["groups"] for rule in group["rules"]]


def alerts():
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded():
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def nodes(expression):
    """All nodes of an expression; of a range, the selector stands behind it."""
    found = []

    def visit(node):
        found.append(node)
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def selectors(expression):
    return [node for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)]


def name_of(selector):
    names = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "__name__"]
    return selector.name or names[0]


def grouping(expression):
    """The labels that aggregations leave; None where nothing is aggregated."""
    found = [node for node in nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
    return {label for node in found for label in node.modifier.labels} if found else None


def metric_of(series):
    """The metric of the catalog that a series belongs to, or None."""
    if series in BY_NAME:
        return None if BY_NAME[series].kind == "histogram" else BY_NAME[series]
    metric = BY_NAME.get(re.sub("_(bucket|sum|count)$", "", series))
    return metric if metric is not None and metric.kind == "histogram" else None


def labels_of(series):
    """All labels that a series of the catalog has after it was scraped."""
    metric = metric_of(series)
    return {"model_name", *metric.labels, *TARGET_LABELS, *(("le",) if series.endswith("_bucket") else ())}
