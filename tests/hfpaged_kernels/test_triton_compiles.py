"""Every launch compiles ahead of time, without a device, for every target that is claimed.

All head sizes in four bytes and in two on one target (the two halves have tiles of one shape and take turns); on the
others, which share the front end, each dtype and every second head size.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.3", reason="its sources are described otherwise before")

from hfpaged_kernels import encoding as encodings
from triton.backends.compiler import GPUTarget

LAUNCHES = runpy.run_path(str(Path(__file__).parent / "triton_launches.py"))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What a program may hold: sm80 stands for the consumer cards of its family (8.6, 8.9), which have least.
SHARED_KIB = {"sm80": 99, "sm90": 227, "sm100": 227, "gfx942": 64}

EVERY_PAIR = [
    ("sm80", dtype, dims) for index, dims in enumerate(DIMS) for dtype in (torch.float32, DTYPES[1 + index % 2])
]
DIAGONAL = [
    (target, DTYPES[index % len(DTYPES)], dims)
    for offset, target in enumerate(("sm90", "sm100", "gfx942"))
    for index, dims in enumerate(DIMS[offset::2], start=offset)
]


# With these every kernel is compiled as often as it is launched; with the others once, with all options of attention.
EVERY_LAUNCH = (128, 128)

# Every encoding once, in turning dtypes: on the oldest NVIDIA target, on AMD, and on one of the two new ones, which
# convert eight-bit floats in hardware.
PAIRS = (
    (encodings.INT8, encodings.INT4_GROUPS),
    (encodings.INT4_CHANNEL, encodings.INT4),
    (encodings.FP8_E4M3, encodings.FP8_E5M2_STATIC),
    (encodings.FP8_E4M3_STATIC, encodings.FP8_E5M2),
)
# Merging and copying know nothing of encodings.
READ_OR_WRITE = {
    "write_kv_kernel", "write_blocks_kernel", "gather_kernel", "decode_kernel", "prefill_kernel", "shared_kernel",
}  # fmt: skip
QUANTIZED = [
    (target, DTYPES[(row + column) % len(DTYPES)], pair, ((128, 128), (96, 96), (192, 128), (80, 80))[row])
    for row, target in enumerate(TARGETS)
    for column, pair in enumerate(PAIRS)
    if target in ("sm80", "gfx942") or column % 2 == (target == "sm100")
]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("target", "dtype", "dims"), EVERY_PAIR + DIAGONAL, ids=lambda value: str(value).replace("torch.", "")
)
def test_every_operation_compiles(target: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    launches = LAUNCHES["launches_of_every_operation"](dtype, *dims)
    assert {launch.kernel.__name__ for launch in launches} == set(LAUNCHES["KERNELS"]) - {"write_blocks_kernel"}
    if dims != EVERY_LAUNCH:
        launches = list({launch.kernel.__name__: launch for launch in reversed(launches)}.values())
    for launch in launches:
        _assert_compiles(launch, target)


@pytest.mark.parametrize(
    ("target", "dtype", "pair", "dims"),
    QUANTIZED,
    ids=[f"{target}-{str(dtype)[6:]}-{keys.name}-{values.name}" for target, dtype, (keys, values), _ in QUANTIZED],
)
def test_every_encoding_compiles(target: str, dtype: torch.dtype, pair: Any, dims: tuple[int, int]) -> None:
    launches = LAUNCHES["launches_of_every_operation"](dtype, *dims, encodings=pair)
    # Of decode one will do: with splits it only ends otherwise.
    chosen = {(launch.kernel.__name__, launch.arguments.get("CODES")): launch for launch in launches}
    chosen = {key: launch for key, launch in chosen.items() if key[0] in READ_OR_WRITE}
    missing = set() if all(encoding.scales != "channel" for encoding in pair) else {"write_kv_kernel"}
    assert {name for name, _ in chosen} == READ_OR_WRITE - missing
    for launch in chosen.values():
        _assert_compiles(launch, target)


@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (7, 1), (71, 8), (8, 256)], ids=lambda value: str(value))
def test_attention_compiles_for_every_kind_of_group_and_block(group: int, block_size: int) -> None:
    launches = LAUNCHES["launches_of_every_operation"](torch.bfloat16, 128, 128, group, block_size)
    for launch in launches:
        _assert_compiles(launch, "sm90")


def _assert_compiles(launch: Any, target: str) -> None:
    name = launch.kernel.__name__
    compiled = LAUNCHES["compiled"](launch, TARGETS[target])
    text, binary = ("amdgcn", "hsaco") if target == "gfx942" else ("ptx", "cubin")
    assert name in compiled.asm[text]
    assert len(compiled.asm[binary]) > 0
    assert compiled.metadata.shared <= SHARED_KIB[target] * 1024, f"{name}: {compiled.metadata.shared} bytes"
