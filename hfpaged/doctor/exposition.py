"""Metrics as a scrape brings them: samples by name, from text or from prometheus_client's families."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from hfpaged.errors import MetricsError

PREFIX = "hfpaged_"
# How the names of other servers begin.
OTHERS = {
    "vllm:": "vLLM",
    "sglang:": "SGLang",
    "tgi_": "text-generation-inference",
    "lmdeploy": "LMDeploy",
    "trtllm_": "TensorRT-LLM",
    "llamacpp:": "llama.cpp",
    "nv_": "Triton Inference Server",
}
HOW_TO_GET = (
    "have them exposed with hfpaged.telemetry.instrument() and prometheus_client.start_http_server(9464), save "
    "hfpaged.telemetry.metrics_text(), or use batcher.diagnose()"
)


MOST = 1e30
LONGEST = 80  # characters of a text that is no metrics


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """`samples` by their names, those of hfpaged only; `known` names, those without any sample yet among them."""

    samples: Mapping[str, list[Sample]]
    known: frozenset[str]

    @property
    def model_names(self) -> list[str]:
        """Sorted; what belongs to no model counts for each."""
        names = {sample.labels.get("model_name", "") for samples in self.samples.values() for sample in samples}
        return sorted(names - {""}) or [""]


def parse(text: str, source: str = "the text") -> Exposition:
    """Prometheus's text format or OpenMetrics. Raises MetricsError for other texts, and for metrics of others."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    try:
        if text.rstrip().endswith("# EOF"):
            families = list(openmetrics.text_string_to_metric_families(text.rstrip() + "\n"))
        else:
            families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(
            f"{source} is no metrics in Prometheus's text format ({short(str(error))}); give what "
            "/metrics of a process answers"
        ) from error
    return from_families(families, source)


def from_families(families: Iterable[Metric], source: str = "what was given") -> Exposition:
    """Raises MetricsError where there is none of hfpaged."""
    samples: dict[str, list[Sample]] = {}
    known: set[str] = set()
    others: set[str] = set()
    for family in families:
        if not family.name.startswith(PREFIX):
            others.add(family.name)
            continue
        known |= {family.name, f"{family.name}_total"} if family.type == "counter" else {family.name}
        for sample in family.samples:
            if _is_told(sample.name, sample.labels, sample.value):
                samples.setdefault(sample.name, []).append(Sample(sample.labels, float(sample.value)))
    if not known:
        raise MetricsError(_not_ours(others, source))
    return Exposition(samples, frozenset(known | set(samples)))


def _is_told(name: str, labels: Mapping[str, str], value: float) -> bool:
    """Whether a process of ours may have said so: none says less than 0 or as much as this."""
    return 0 <= value < MOST and (not name.endswith("_bucket") or _is_number(labels.get("le", "")))


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def short(text: str) -> str:
    """An error as a part of one line: it may repeat what was read, which may be a page, or no text at all."""
    text = " ".join(text.split())
    return "".join(each if each.isprintable() else "?" for each in text[:LONGEST]) + "..." * (len(text) > LONGEST)


def _not_ours(names: set[str], source: str) -> str:
    server = next((of for prefix, of in OTHERS.items() if any(name.startswith(prefix) for name in names)), None)
    if server is not None:
        return f"{source} has metrics of {server}, not of hfpaged, and this doctor knows no other engine; {HOW_TO_GET}"
    count = f"{len(names)} metrics, none of them" if names else "no metric"
    return f"{source} has {count} named {PREFIX}...: {HOW_TO_GET}"
