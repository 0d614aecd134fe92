"""The floors: a file imports only from its own floor or a lower one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import hfpaged

ROOT = Path(__file__).parent.parent

# A file that is not in this table fails the tests below: decide on which floor it stands and write it down.
# A name that ends with "*" stands for all that begin like it.
FLOORS = {
    0: "errors config cache_stats block_hash block_pool block_table block_trace common_runs ghosts layer_groups"
    " prefix_block prefix_index match_end token_chain sequence block_manager prefix_cache prefix_tree prefill_plan"
    " piece_kind prefix_report explain stream_rule residuals clock memory_account generation_events outliving"
    " live_pools live_display kv_names tiers_spec store_counts"
    " usable_prefix pool_change"
    " restore_costs restore_plan swap_counts match_below",
    1: "ranks kv_format filling part_store kv_storage pool_size pool_memory pool_debug memory_grid memory_map"
    " memory_owners memory_plot memory_table picture kv_pool content fingerprint shared_runs step step_copies"
    " step_residuals padding row_tokens rows packed_step packed_rows static_step stored_steps step_plan admission"
    " tensor_file kv_scales prefix_manifest prefix_saving prefix_loading onednn_weight pool_contents tier block_rows"
    " device_copies agreed_matches"
    " host_tier swapping device_timer restoring"
    " prefix_store*"
    " packed_plan spread weight_contents",
    2: "adapters adapter_choice compat compat_beams compat_generation layer_states layer_step new_blocks"
    " graph handle paged_layer state_layer model_classes pageable mask_pattern mask attention attention_code"
    " attention_origin pictures prefix_sharing prefix_lookup cache_pool row_cache cache patching"
    " sinks streaming streaming_support packed_cache prepack prepack_faults prepack_gain"
    " prepack_report generation_watch generation_inputs tensor_parallel compat_sharding same_tokens whole_weights",
    3: "engine*",
    4: "__init__ __main__ cli demo demo_model demo_wheel measure bench* quality* verdict support conditions telemetry*"
    " doctor* watching* serve* json_file model_arguments model_folder custom_code planner* stress* replicas*"
    " kv_events* load_errors tokenizer_loading",
}

# Libraries that a floor must not import, at the top or late.
FORBIDDEN = {
    0: {"torch", "numpy", "transformers", "numba", "triton", "hfpaged_kernels"},
    1: {"transformers"},
    2: set(),
    3: set(),
    4: set(),
}

# Late imports that go up or round, each with its reason. Nothing else may.
LATE = {
    ("generation_watch", "cache"): "the cache patches the model, a patched model tells of its forwards, and those who"
    " record them ask whether a cache is ours",
    ("generation_watch", "patching"): "see above",
    (
        "engine.batcher_facts",
        "doctor",
    ): "batcher.diagnose() is for those who have a batcher and no server, and runs when asked",
    ("patching", "cache"): "the cache patches the model, and a patched model asks whether its cache is ours",
}


class Import(NamedTuple):
    module: str  # dotted, without "hfpaged." for our own files
    is_own: bool
    is_late: bool
    line: int


def files(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def name_of(path):
    return ".".join(path.relative_to(ROOT / "hfpaged").with_suffix("").parts).removesuffix(".__init__")


OWN = {name_of(path) for path in files("hfpaged")}


def floor_of(name):
    """The floor of a file, or None for one that nobody has put on a floor."""
    for floor, names in FLOORS.items():
        for entry in names.split():
            if name == entry or (entry.endswith("*") and name.split(".")[0].startswith(entry[:-1])):
                return floor
    return None


def imports_of(source):
    """All imports of a source text but those under `if TYPE_CHECKING`."""
    found = []

    def visit(node, is_late):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = node.orelse
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.extend(own_or_not(alias.name, is_late, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports are not used here"
            names = [f"hfpaged.{alias.name}" for alias in node.names] if node.module == "hfpaged" else []
            found.extend(own_or_not(name, is_late, node.lineno) for name in names or [node.module])
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in children:
            visit(child, is_late or is_function)

    visit(ast.parse(source), False)
    return found


def own_or_not(module, is_late, line):
    package, _, rest = module.partition(".")
    if package != "hfpaged":
        return Import(module, False, is_late, line)
    home = hfpaged._HOME_OF.get(rest)  # `from hfpaged import KVPool` imports hfpaged.kv_pool
    rest = home.removeprefix("hfpaged.") if home else rest
    return Import(rest if rest in OWN else "__init__", True, is_late, line)


def faults(name, source):
    """What a file imports although its floor does not allow it, one sentence each."""
    floor = floor_of(name)
    if floor is None:
        return [f"hfpaged/{name}.py is on no floor; add it to FLOORS in {Path(__file__).name}"]
    told = []
    for module, is_own, is_late, line in imports_of(source):
        if not is_own:
            library = module.split(".")[0]
            if library in FORBIDDEN[floor]:
                told.append(f"{name}.py, line {line}: floor {floor} must not import {library}")
        elif not (is_late and (name, module) in LATE) and (floor_of(module) is None or floor_of(module) > floor):
            told.append(f"{name}.py, line {line}: floor {floor} must not import {module} of floor {floor_of(module)}")
    return told


@pytest.mark.parametrize("path", files("hfpaged"), ids=name_of)
def test_a_file_imports_only_from_its_own_and_lower_floors(path):
    told = faults(name_of(path), path.read_text(encoding="utf-8"))
    assert not told, "\n".join(told)


@pytest.mark.parametrize("path", files("kernels"), ids=lambda path: path.stem)
def test_the_kernels_know_nothing_of_hfpaged_and_transformers(path):
    imported = {i.module.split(".")[0]: i.line for i in imports_of(path.read_text(encoding="utf-8")) if not i.is_own}
    own = [i for i in imports_of(path.read_text(encoding="utf-8")) if i.is_own]
    assert not own, f"{path.name}, line {own[0].line}: imports {own[0].module} of hfpaged"
    assert "transformers" not in imported


def test_the_floors_name_only_files_that_exist_and_each_once():
    names = [entry for row in FLOORS.values() for entry in row.split()]
    assert len(names) == len(set(names))
    assert {name for name in names if not name.endswith("*")} <= OWN


def test_files_import_each_other_in_no_circle():
    graph = {
        name_of(path): {i.module for i in imports_of(path.read_text(encoding="utf-8")) if i.is_own and not i.is_late}
        - {"__init__"}
        for path in files("hfpaged")
    }
    while graph:
        leaves = {name for name, needed in graph.items() if not needed & set(graph)}
        assert leaves, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in leaves}


def test_each_allowed_late_import_is_still_there():
    for (name, module), reason in LATE.items():
        source = (ROOT / "hfpaged" / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert any(i.module == module and i.is_late for i in imports_of(source)), (name, module)
        assert reason


# The tests above can fail: what each of these sources does is found.
WRONG = [
    ("block_pool", "import torch", "floor 0 must not import torch"),
    ("block_pool", "from numpy.typing import NDArray", "floor 0 must not import numpy"),
    ("config", "def f():\n    import torch.nn as nn", "line 2: floor 0 must not import torch"),
    ("rows", "from transformers.cache_utils import Cache", "floor 1 must not import transformers"),
    ("rows", "import hfpaged.cache", "floor 1 must not import cache of floor 2"),
    ("rows", "from hfpaged import mask, step", "floor 1 must not import mask of floor 2"),
    (
        "block_table",
        "class A:\n    def f(self):\n        from hfpaged.step import Step",
        "import step of floor 1",
    ),
    ("cache", "try:\n    from hfpaged.demo import run\nexcept ImportError:\n    pass", "demo of floor 4"),
    ("patching", "from hfpaged.cli import main", "cli of floor 4"),
    (
        "step",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import transformers",
        "floor 1 must not import transformers",
    ),
    ("kv_pool", "from hfpaged import PagedCache", "floor 1 must not import cache of floor 2"),
    ("kv_pool", "import hfpaged", "floor 1 must not import __init__ of floor 4"),
    ("brand_new", "", "hfpaged/brand_new.py is on no floor; add it to FLOORS"),
    ("brand.new", "", "hfpaged/brand.new.py is on no floor"),
]


@pytest.mark.parametrize(("name", "source", "words"), WRONG, ids=[f"{case[0]}-{i}" for i, case in enumerate(WRONG)])
def test_a_wrong_import_is_found_wherever_it_hides(name, source, words):
    (told,) = faults(name, source)
    assert words in told


RIGHT = [
    ("block_pool", "from hfpaged.errors import IntegrityError\nimport array"),
    ("step", "import torch, numpy\nfrom hfpaged.block_table import BlockTable"),
    ("step", "if TYPE_CHECKING:\n    from hfpaged.cache import PagedCache\n    import transformers"),
    ("step", "if typing.TYPE_CHECKING:\n    import transformers"),
    ("patching", "def f():\n    from hfpaged.cache import PagedCache"),
    ("bench_report", "from hfpaged import cache, demo\nimport transformers"),
    ("demo", "import hfpaged"),
    ("mask", "from hfpaged import OutOfBlocksError, KVPool, compat"),
]


@pytest.mark.parametrize(("name", "source"), RIGHT, ids=[f"{case[0]}-{i}" for i, case in enumerate(RIGHT)])
def test_imports_that_go_down_or_are_for_types_only_are_free(name, source):
    assert faults(name, source) == []


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("module", ["hfpaged", "hfpaged.errors", "hfpaged.block_manager", "hfpaged.cli"])
def test_importing_it_loads_neither_torch_nor_transformers(module):
    heavy = "{'torch', 'transformers', 'numpy', 'numba', 'triton'}"
    done = run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_names_of_floors_0_and_1_come_without_transformers():
    done = run_python(
        "import sys, hfpaged; hfpaged.KVPool; hfpaged.OutOfBlocksError; print('torch' in sys.modules,"
        " 'transformers' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]
