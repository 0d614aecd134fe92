"""guidellm, vLLM's load generator: a few streams of chat and of completions, each as long as it wanted."""

from __future__ import annotations

import json

import client_tools
import pytest

from hfpaged import demo_model

pytestmark = [pytest.mark.demo_model, pytest.mark.clients, pytest.mark.timeout(3600)]
GUIDELLM = client_tools.Tool("guidellm", "HFPAGED_GUIDELLM", ("guidellm",), ("torch", "transformers"))
PROMPT, OUTPUT, REQUESTS = 32, 8, 6


@pytest.fixture(scope="module")
def guidellm(tools_folder):
    return client_tools.find(GUIDELLM, tools_folder)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_measures_every_request_to_its_end(guidellm, product, tmp_path, path):
    before = product.figures()
    command = [
        guidellm, "run", "--backend",
        f"kind=openai_http,target={product.url},api_key={product.key},request_format={path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={demo_model.path()}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive",
    ]  # fmt: skip
    print(client_tools.run(command, tmp_path, HF_HUB_OFFLINE="1").stdout)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[how]) for how in ("successful", "errored", "incomplete")] == [REQUESTS, 0, 0]
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {OUTPUT}
    told = sum(one["input_metrics"]["text_tokens"] for one in requests["successful"])
    counted = product.figures()("hfpaged_prompt_tokens_total") - before("hfpaged_prompt_tokens_total")
    assert told == counted
    assert product.received() - before("hfpaged_requests_received_total") == REQUESTS
