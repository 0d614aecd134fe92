"""/openapi.json tells what the server does: Schemathesis, which reads it, finds nothing that is not so."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from sysconfig import get_path

import pytest
import serve_models
from served import served

from hfpaged.serve import ServeOptions

pytestmark = pytest.mark.usefixtures("one_thread")
SCHEMATHESIS = Path(get_path("scripts")) / "st"
GENERATE = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def server():
    headers = {"Authorization": "Bearer secret"}
    with (
        serve_models.batcher(max_model_len=48, max_num_seqs=16) as batcher,
        served(batcher, ServeOptions(api_keys={"me": "secret"}), headers=headers) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def document(server):
    return server.client.get("/openapi.json").json()


def operations(document):
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_each_operation_tells_of_its_errors_in_the_one_shape_they_have(document):
    assert "HTTPValidationError" not in str(document)
    for path, _, operation in operations(document):
        errors = {status: answer for status, answer in operation["responses"].items() if status[0] in "45"}
        assert {"400", "503"} <= set(errors), path
        for answer in errors.values():
            schema = answer["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}, path
        if "requestBody" in operation:
            assert {"401", "404", "422", "429"} <= set(errors), path


def test_fields_have_descriptions_and_bounds(document):
    schemas = document["components"]["schemas"]
    for name in ("ChatBody", "CompletionBody", "TokenizeBody"):
        assert all("description" in field for field in schemas[name]["properties"].values()), name
    number = schemas["ChatBody"]["properties"]["top_p"]["anyOf"][0]
    assert (number["exclusiveMinimum"], number["maximum"]) == (0, 1)
    for path in GENERATE:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert {"application/json", "text/event-stream"} == set(content)


def test_every_reference_leads_somewhere(document):
    for name in re.findall(r"#/components/schemas/(\w+)", str(document)):
        assert name in document["components"]["schemas"]


def test_who_needs_a_key_is_told(server, document):
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, method, operation in operations(document):
        if "{" in path:
            continue
        wanted = server.client.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert (operation["security"] == [{"bearer": []}]) is wanted, path


def test_another_method_is_refused_with_those_that_are_not(server, document):
    for path, methods in document["paths"].items():
        response = server.client.delete(path.replace("{model}", "x"))
        assert response.status_code == 405
        assert {method.strip().lower() for method in response.headers["Allow"].split(",")} >= set(methods)
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="needs schemathesis")
def test_schemathesis_finds_no_fault(server, tmp_path):
    """All of its checks but one: what a schema allows can be wrong together (best_of below n), and is refused then."""
    command = [
        SCHEMATHESIS, "run", server.url + "/openapi.json", "--checks", "all",
        "--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing", "--max-examples", "5",
        "--seed", "1", "--warnings", "off", "--header", "Authorization: Bearer secret",
    ]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
