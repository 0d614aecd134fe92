from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hfpaged
from hfpaged import errors

SOURCE = ast.parse(Path(hfpaged.__file__).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", hfpaged.__all__)
def test_each_public_name_can_be_imported_and_comes_from_the_home_that_is_written_for_it(name):
    attribute = getattr(hfpaged, name)
    home = importlib.import_module(hfpaged._HOME_OF[name])
    assert attribute is getattr(home, name)
    assert attribute.__name__ == name
    assert attribute.__module__ == home.__name__
    assert inspect.getdoc(attribute)


def test_a_star_import_brings_all_public_names_and_no_other():
    scope = {}
    exec("from hfpaged import *", scope)
    assert set(scope) - {"__builtins__"} == set(hfpaged.__all__)


def test_public_names_are_sorted_and_each_stands_once():
    assert hfpaged.__all__ == sorted(set(hfpaged.__all__))
    assert set(hfpaged.__all__) == set(hfpaged._HOME_OF)


def test_type_checkers_see_the_same_names_at_the_same_homes():
    (block,) = [node for node in SOURCE.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == hfpaged._HOME_OF


def test_dir_lists_the_public_names_and_the_version():
    assert dir(hfpaged) == sorted([*hfpaged.__all__, "__version__"])


def test_a_name_is_looked_up_once():
    vars(hfpaged).pop("KVPool", None)
    first = hfpaged.KVPool
    assert vars(hfpaged)["KVPool"] is first
    assert hfpaged.KVPool is first


@pytest.mark.parametrize("name", ["PagedCaches", "pagedcache", "_nothing", "torch"])
def test_an_unknown_name_is_an_attribute_error_that_names_it(name):
    with pytest.raises(AttributeError, match=f"module 'hfpaged' has no attribute '{name}'"):
        getattr(hfpaged, name)
    assert not hasattr(hfpaged, name)
    with pytest.raises(ImportError):
        exec(f"from hfpaged import {name}", {})


def test_the_version_is_that_of_the_installed_package():
    assert hfpaged.__version__ == importlib.metadata.version("hfpaged")
    assert hfpaged.__version__[0].isdigit()


def test_all_errors_are_public_and_of_one_family():
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert own == {name for name, home in hfpaged._HOME_OF.items() if home == "hfpaged.errors"}
    assert all(issubclass(getattr(errors, name), errors.HfpagedError) for name in own)


BUILT_IN = [
    ("InvalidConfigError", ValueError),
    ("CacheMismatchError", ValueError),
    ("UnsupportedModelError", ValueError),
    ("AutogradError", RuntimeError),
    ("IntegrityError", AssertionError),
]


@pytest.mark.parametrize(("name", "base"), BUILT_IN)
def test_errors_can_be_caught_as_the_built_in_ones_that_they_are_kinds_of(name, base):
    assert issubclass(getattr(hfpaged, name), base)


def test_out_of_blocks_says_the_numbers_and_the_remedy():
    error = hfpaged.OutOfBlocksError(5, 2, 9, hint=" A hint.")
    assert (error.needed, error.free, error.total) == (5, 2, 9)
    assert str(error).startswith("5 more blocks are needed, 2 of the pool's 9 are free.")
    assert "memory= or num_blocks=" in str(error)
    assert str(error).endswith(" A hint.")


def test_telemetry_needs_no_import_of_its_own_and_loads_no_torch():
    code = "import sys, hfpaged; hfpaged.telemetry.instrument(); assert not {'torch', 'transformers'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
