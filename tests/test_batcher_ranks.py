"""A batcher whose model two processes compute together gives what one process gives."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import adapted
import pytest
import tiny_models
import two_ranks

from hfpaged import InvalidConfigError, UnsupportedModelError
from hfpaged.engine.rank_support import check_ranks, check_runner
from hfpaged.engine.sizing import PoolSizing
from hfpaged.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED = ("greedy", "sampled", "beams", "in chunks", "preempted", "int8", "int4", "prompt lookup", "windows")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = [tmp_path_factory.mktemp(name) for name in ("llama", "gemma2")]
    for path, name in zip(paths, ("llama", "gemma2"), strict=True):
        tiny_models.shared(name).save_pretrained(path)
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def ranks(folders, tmp_path_factory):
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), "batcher_ranks_worker.py", *folders)


@pytest.fixture(scope="module")
def alone(folders):
    """The very same cases, in this process."""
    path = Path(__file__).parent / "batcher_ranks_worker.py"
    before, sys.argv = sys.argv, [str(path), *folders]
    try:
        spec = importlib.util.spec_from_file_location("batcher_ranks_worker", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.argv = before
    return module.CASES


@pytest.mark.parametrize("case", ASKED)
def test_all_ranks_get_the_tokens_of_one_process(ranks, alone, case):
    expected, (first, second) = alone[case](), ranks.of(case)
    for part in ("first", "second", "found", "preemptions", "accepted", "forward"):
        assert first[part] == expected[part], part
    assert second["first"] == expected["first"]
    assert second["second"] == expected["second"]
    assert first["free"]
    assert second["free"]
    assert (first["ranks"], expected["ranks"]) == (2, 1)


@pytest.mark.parametrize("case", ASKED)
def test_each_rank_keeps_half_of_the_bytes(ranks, alone, case):
    first, second = ranks.of(case)
    assert first["bytes"] == second["bytes"]
    if case == "greedy":
        assert 2 * first["bytes"] == alone[case]()["bytes"]


def test_cases_are_what_they_are_called(ranks):
    assert all(ranks.of("greedy")[0]["found"][1:4:2])  # prefixes of the long ones
    assert ranks.of("preempted")[0]["preemptions"] > 0
    assert ranks.of("prompt lookup")[0]["accepted"] > 0


def test_what_cannot_lie_side_by_side_is_computed_one_by_one_by_all(ranks, alone):
    first, second = ranks.of("one by one")
    assert first == alone["one by one"]()
    assert first[0].startswith("one by one")
    assert second[1] == first[1]


def test_rank_0_alone_can_have_requests_and_give_them_up(ranks, alone):
    assert ranks.of("aborted") == [alone["aborted"](), True]
    assert ranks.of("aborted")[0][0] == ["length", "abort"]
    assert ranks.of("streamed") == [alone["streamed"](), None]


def test_what_rank_0_refuses_is_refused_on_all(ranks):
    first, second = ranks.of("refused")
    assert first[:2] == second[:2] == ["RequestTooLongError", "InvalidConfigError"]
    assert "requests go to rank 0" in second[2]
    assert first[2:] == second[3:]
    assert all("this rank's heads" in said for said in first[2:4])
    assert "other blocks" in first[4]


def test_what_ranks_cannot_do_is_refused_by_name(ranks):
    first, second = ranks.of("refused sizes")
    assert first == second
    assert [said.partition(" ")[0] for said in first] == [
        "cuda_graphs=",
        "shadow=",
        "prepack=True",
        "swap_space='1MiB',",
    ]


def test_batchers_that_are_not_alike_are_refused_on_all_ranks(ranks):
    for number, said in enumerate(ranks.of("unlike")):
        assert len(said) == 4
        assert all(f"of a batcher: rank 0 and rank 1 of 2 differ (this is rank {number})" in each for each in said)


def test_a_rank_without_room_for_a_pool_is_told_of_on_all(ranks):
    assert all("nothing is left for a pool" in said for said in ranks.of("no room"))


def test_ranks_on_one_machine_divide_its_memory_and_have_pools_of_one_size(ranks):
    first, second = ranks.of("sized by memory")
    assert first[0] == second[0]
    assert "divided by 2 processes" in first[1]
    assert first[2] == second[2] == "length"


NOTHING_ASKED = {"kv_scales": None, "cuda_graphs": False, "shadow": 0.0, "prepack": None}
TWO = Ranks(0, 2, None)


@pytest.mark.parametrize(("pool", "asked", "said"), [
    (object(), {}, "pool= with a model that 2 ranks"),
    (None, {"kv_scales": "a file"}, "kv_scales= with a model that 2 ranks"),
])  # fmt: skip
def test_what_the_other_ranks_do_not_have_is_refused(pool, asked, said):
    with pytest.raises(InvalidConfigError, match=re.escape(said)):
        check_ranks(TWO, tiny_models.shared("llama"), pool, SimpleNamespace(**NOTHING_ASKED | asked))
    check_ranks(None, tiny_models.shared("llama"), pool, SimpleNamespace(**NOTHING_ASKED | asked))


def test_adapters_and_states_are_refused_by_name():
    asked = SimpleNamespace(**NOTHING_ASKED)
    model = adapted.make()
    with pytest.raises(InvalidConfigError, match="adapters with a model that 2 ranks"):
        check_ranks(TWO, model, None, asked)
    keeps_state = SimpleNamespace(cache=SimpleNamespace(keeps_state=True), model=model)
    with pytest.raises(UnsupportedModelError, match="keep a state beside keys and values"):
        check_runner(TWO, keeps_state)


def test_a_share_of_one_machine_is_divided_and_the_smallest_counts():
    sizing = PoolSizing(total=1000, share=0.5, used=100, activations=20, states=10)
    assert sizing.pool == 370
    assert replace(sizing, sharers=2).pool == 170
    assert replace(sizing, sharers=2, most=99).pool == 99
    with pytest.raises(InvalidConfigError, match="divided by 100 processes"):
        replace(sizing, sharers=100).pool  # noqa: B018
