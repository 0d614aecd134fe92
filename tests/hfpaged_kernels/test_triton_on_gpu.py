"""The checks that the interpreter passes, on a real device."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

CHECKS = {
    name: check
    for table in ("triton_cases", "triton_quantized_cases")
    for name, check in runpy.run_path(str(Path(__file__).parent / f"{table}.py"))["CHECKS"].items()
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_triton_form_equals_plain_torch_on_a_device(name: str) -> None:
    check, case = CHECKS[name]
    check(case, "cuda")


def test_decode_can_be_captured_in_a_graph() -> None:
    from hfpaged_kernels import reference, triton_form

    torch.manual_seed(0)
    query = torch.randn(2, 4, 64, device="cuda")
    keys, values = torch.randn(2, 8, 2, 16, 64, device="cuda")
    tables = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    lengths = torch.tensor([5, 20], dtype=torch.int32, device="cuda")
    triton_form.decode(query, keys, values, tables, lengths, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = triton_form.decode(query, keys, values, tables, lengths, scale=0.1)
    lengths.copy_(torch.tensor([64, 0]))
    graph.replay()
    expected = reference.decode(query, keys, values, tables, lengths, scale=0.1)
    torch.testing.assert_close(result, expected, atol=3e-6, rtol=1e-5)
