"""Runs of rows that read the same blocks first."""

import numpy as np
import pytest

from hfpaged import shared_runs as module
from hfpaged.shared_runs import SharedRun, shared_runs


def runs(tables, contexts, block_size=4):
    return shared_runs(np.array(tables, dtype=np.int32), contexts, block_size)


def test_one_run_has_the_leading_blocks_that_all_rows_have():
    assert runs([[5, 6, 7], [5, 6, 8], [5, 6, 9]], [12, 12, 12]) == (SharedRun(0, 3, 2),)


@pytest.mark.parametrize(("context", "blocks"), [(7, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_every_row_goes_on_behind_the_shared_blocks(context, blocks):
    assert runs([[5, 6, 7, 1], [5, 6, 7, 2]], [16, context]) == (SharedRun(0, 2, blocks),)


@pytest.mark.parametrize("tables", [[[1, 2]], [[1, 2], [3, 2]], [[1, 2], [3, 4], [1, 2]]])
def test_rows_that_begin_apart_share_nothing(tables):
    assert runs(tables, [8] * len(tables)) == ()


def test_a_block_that_is_not_full_is_not_shared():
    assert runs([[1, -1], [1, -1]], [4, 4]) == ()


def test_several_runs_are_told_where_they_spare_enough(monkeypatch):
    tables = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 9, 10], [8, 11, 12]]
    assert runs(tables, [12] * 5) == ()
    monkeypatch.setattr(module, "WORTH_A_CALL", 4)
    assert runs(tables, [12] * 5) == (SharedRun(0, 2, 2), SharedRun(2, 3, 0), SharedRun(3, 5, 1))
