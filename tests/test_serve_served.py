"""The servers of the other tests: what they assert can fail."""

from __future__ import annotations

import pytest
import tiny_models
from served import assert_nothing_left, served

from hfpaged import ContinuousBatcher, InvalidConfigError
from hfpaged.serve import ServeOptions, build_app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def batcher():
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "prepack": False}
    with ContinuousBatcher(tiny_models.shared("llama"), **sizes) as batcher:
        yield batcher


def test_a_batcher_is_served_while_inside(batcher):
    with served(batcher) as server:
        assert server.client.get("/health").status_code == 200
        assert server.service.batcher is server.batcher is batcher


def test_what_is_left_is_seen(batcher):
    batcher.add_request([5, 6, 7], max_new_tokens=50, ignore_eos=True)
    with pytest.raises(AssertionError):
        assert_nothing_left(batcher)
    batcher.step()
    batcher.loop.end_all()
    assert_nothing_left(batcher)


def test_a_name_of_both_the_model_and_an_adapter_is_refused(batcher):
    with pytest.raises(InvalidConfigError, match="'mine' is a name of the model and of an adapter"):
        ServeOptions(served_model_names=("mine",), adapters={"mine": "folder"})
    name = build_app(batcher).state.service.model_names[0]
    with pytest.raises(InvalidConfigError, match="use two names"):
        build_app(batcher, ServeOptions(adapters={name: "folder"}))
