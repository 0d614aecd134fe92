"""The machine of a plan: cards as people write them, sizes, and what is found here without torch."""

from __future__ import annotations

import psutil
import pytest

from hfpaged.errors import InvalidConfigError
from hfpaged.planner import devices
from hfpaged.planner.cards import CARDS, find_card
from hfpaged.planner.devices import machine_of

MIB, GIB = 1 << 20, 1 << 30
TORCH_IS_FOR_CPUS = devices._torch_is_for_cpus


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of this name on the path, and nothing else; it prints `lines`."""
    monkeypatch.setattr(devices, "_torch_is_for_cpus", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(*lines, code=0):
        program = tmp_path / "nvidia-smi"
        told = "".join(f"echo '{line}'\n" for line in lines)
        program.write_text(f"#!/bin/sh\n{told}exit {code}\n")
        program.chmod(0o755)

    return install


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100"),
        ("A100-80GB", "A100-80GB"),
        ("a100 80gb", "A100-80GB"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("a100", "A100-40GB"),  # the smaller one: no plan promises too much
    ],
)
def test_cards_are_found_as_people_and_drivers_write_them(written, name):
    assert machine_of(written).name == name


def test_each_name_is_of_one_card_and_they_are_sorted_by_memory():
    names = [name for card in CARDS for name in (card.name, *card.names)]
    assert all(name in (find_card(name).name, *find_card(name).names) for name in names)
    assert [card.memory for card in CARDS] == sorted(card.memory for card in CARDS)
    assert all(10 < card.gib < 300 and 300 <= card.bandwidth <= 8000 for card in CARDS)


@pytest.mark.parametrize(
    ("written", "size"),
    [("80GiB", 80 * GIB), ("80GB", 80 * 10**9), ("80", 80 * 10**9), ("24g", 24 * 10**9), ("80000000000", 80 * 10**9)],
)
def test_sizes_are_taken_as_they_are_and_bare_numbers_as_gb(written, size):
    assert machine_of(written).memory == size


@pytest.mark.parametrize(
    ("written", "words"),
    [("gaudi", "one of: RTX 3060, T4"), ("80foo", "write 80GiB or 80GB"), ("0GB", "write 80GiB or 80GB")],
)
def test_others_are_refused_with_what_would_do(written, words):
    with pytest.raises(InvalidConfigError, match=words):
        machine_of(written)


def test_cpu_is_the_memory_of_this_machine_with_what_others_use():
    found = machine_of("cpu")
    assert found.is_cpu
    assert found.memory == psutil.virtual_memory().total
    assert 0 < found.in_use < found.memory


def test_nvidia_smi_tells_cards_and_what_others_use(nvidia_smi, tmp_path):
    nvidia_smi("NVIDIA L4, 23034, 512", "NVIDIA L4, 23034, 0")
    found = machine_of("detect", tmp_path)
    assert (found.name, found.count, found.in_use) == ("NVIDIA L4", 2, 512 * MIB)
    assert found.memory == find_card("L4").memory < 23034 * MIB  # programs see less than it says
    assert found.bandwidth == 300


def test_a_card_that_is_in_no_table_has_the_memory_that_nvidia_smi_says(nvidia_smi, tmp_path):
    nvidia_smi("NVIDIA Something 9000, 10000, [N/A]")
    found = machine_of("detect", tmp_path)
    assert (found.memory, found.in_use, found.bandwidth) == (10000 * MIB, 0, None)


def test_a_part_of_a_card_is_not_taken_for_the_whole(nvidia_smi, tmp_path):
    nvidia_smi("NVIDIA H100 80GB HBM3, 20000, 0")
    assert machine_of("detect", tmp_path).memory == 20000 * MIB


@pytest.mark.parametrize("lines", [(), ("No devices were found",), ("NVIDIA X, [N/A], [N/A]",)])
def test_without_a_card_it_is_the_memory_of_the_machine(nvidia_smi, tmp_path, lines):
    nvidia_smi(*lines)
    assert machine_of("detect", tmp_path).is_cpu
    nvidia_smi("broken", code=9)
    assert machine_of("detect", tmp_path).is_cpu


@pytest.mark.parametrize(("version", "is_cpu"), [("2.9.0+cpu", True), ("2.9.0+cu128", False), ("2.9.0", False)])
def test_a_torch_for_cpus_has_no_use_for_a_card(nvidia_smi, tmp_path, monkeypatch, version, is_cpu):
    nvidia_smi("NVIDIA L4, 23034, 512")
    monkeypatch.setattr(devices, "_torch_is_for_cpus", TORCH_IS_FOR_CPUS)
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: version)
    assert machine_of("detect", tmp_path).is_cpu == is_cpu


def test_the_largest_amd_card_is_found_in_sysfs(nvidia_smi, tmp_path):
    for number, (total, used) in enumerate([(512 * MIB, 0), (64 * GIB, GIB), (16 * GIB, 0)]):
        folder = tmp_path / f"class/drm/card{number}/device"
        folder.mkdir(parents=True)
        (folder / "mem_info_vram_total").write_text(f"{total}\n")
        (folder / "mem_info_vram_used").write_text(f"{used}\n")
    found = machine_of("detect", tmp_path)
    assert (found.memory, found.in_use, found.count) == (64 * GIB, GIB, 2)
