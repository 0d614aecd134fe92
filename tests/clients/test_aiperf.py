"""aiperf, NVIDIA's load generator, which reads /metrics besides and looks there for vLLM's names."""

from __future__ import annotations

import json

import client_tools
import pytest

from hfpaged import demo_model

pytestmark = [pytest.mark.demo_model, pytest.mark.clients, pytest.mark.timeout(3600)]
AIPERF = client_tools.Tool("aiperf", "HFPAGED_AIPERF", ("aiperf",), ("transformers",))
OUTPUT, REQUESTS = 8, 4


def test_aiperf_gets_every_token_and_finds_our_metrics(product, tmp_path, tools_folder):
    aiperf = client_tools.find(AIPERF, tools_folder)
    command = [
        aiperf, "profile", "-m", product.model, "--url", product.url, "--api-key", product.key,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(demo_model.path()), "--concurrency", "2",
        "--request-count", str(REQUESTS), "--isl", "32", "--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--ui", "none", "--random-seed", "1", "--output-artifact-dir", "artifacts",
    ]  # fmt: skip
    print(client_tools.run(command, tmp_path).stdout)
    (report,) = tmp_path.glob("artifacts/**/profile_export_aiperf.json")
    told = json.loads(report.read_text())
    assert told["request_count"]["avg"] == REQUESTS
    assert not told.get("error_summary")
    assert (told["output_sequence_length"]["min"], told["output_sequence_length"]["max"]) == (OUTPUT, OUTPUT)
    (scraped,) = tmp_path.glob("artifacts/**/server_metrics_export.json")
    metrics = json.loads(scraped.read_text())["metrics"]
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds"} <= set(metrics)
