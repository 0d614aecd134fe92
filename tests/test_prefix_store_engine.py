"""A prefix store below the pool of an engine: requests wait for a disk, steps do not, and answers stay the same."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from family_models import build
from peft import LoraConfig, get_peft_model
from tiny_models import make, shared

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.errors import InvalidConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"num_blocks": 96, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128}


@pytest.fixture(autouse=True)
def unpatched():
    """The models of `shared` are used by other files too."""
    yield
    for name in ("llama", "gemma2"):
        hfpaged.unpatch(shared(name))


def prompt(seed, length=61):
    return torch.randint(1, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def store_of(batcher):
    return batcher.pool.swapping.lower


def run(batcher, prompts, **options):
    outputs = batcher.generate(prompts, max_new_tokens=6, do_sample=False, **options)
    batcher.pool.check_integrity()
    assert all(output.finish_reason != "error" for output in outputs)
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def written(model, path, prompts, **options):
    """A service that computes these, writes and is closed; its tokens."""
    with ContinuousBatcher(model, prefix_store=path, **SIZES | options) as batcher:
        return run(batcher, prompts)[0]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_first_request_of_another_service_has_cached_tokens_and_the_same_answer(name, tmp_path):
    model, prompts = shared(name), [prompt(1), prompt(2, 45), prompt(3)]
    plain = run(ContinuousBatcher(model, **SIZES), prompts)[0]
    assert written(model, tmp_path, prompts) == plain
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        tokens, cached = run(batcher, prompts)
        assert tokens == plain
        assert cached == [60, 44, 60]
        counts = store_of(batcher).store.counts
        assert (counts.damaged, counts.failed, counts.dropped) == (0, 0, 0)
        assert "prefix store" in batcher.describe()["prefix_store"]


def test_two_services_at_once_give_and_take(tmp_path):
    model = shared("llama")
    first = ContinuousBatcher(model, prefix_store=tmp_path, **SIZES)
    second = ContinuousBatcher(model, prefix_store=tmp_path, **SIZES)
    plain = run(ContinuousBatcher(model, **SIZES), [prompt(1), prompt(2)])[0]
    assert run(first, [prompt(1)]) == ([plain[0]], [0])
    assert store_of(first).writer.flush(60)  # which is still running
    assert run(second, [prompt(1), prompt(2)]) == (plain, [60, 0])
    assert store_of(second).writer.flush(60)
    assert run(first, [prompt(2)]) == ([plain[1]], [60])
    for batcher in (first, second):
        batcher.close()


def test_a_request_waits_for_a_slow_disk_and_others_go_on(tmp_path, monkeypatch):
    model, slow, quick = shared("llama"), prompt(1), prompt(9, 20)
    plain = written(model, tmp_path, [slow])
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        goes_on, get = threading.Event(), store_of(batcher).store.get
        monkeypatch.setattr(store_of(batcher).store, "get", lambda *block: goes_on.wait(60) and get(*block))
        first = batcher.add_request(slow, max_new_tokens=6, do_sample=False)
        second = batcher.add_request(quick, max_new_tokens=6, do_sample=False)
        done = {}
        while second not in done:
            done |= {output.request_id: output for output in batcher.step() if output.finished}
        assert first not in done
        goes_on.set()
        while first not in done:
            done |= {output.request_id: output for output in batcher.step() if output.finished}
        assert done[first].token_ids == plain[0]
        assert done[first].num_cached_tokens == 60
        batcher.pool.check_integrity()


def test_a_disk_that_does_not_answer_is_given_up_and_the_prompt_computed(tmp_path, monkeypatch):
    model = shared("llama")
    plain = written(model, tmp_path, [prompt(1)])
    monkeypatch.setattr("hfpaged.prefix_store_reader.PATIENCE_SECONDS", 0.2)
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        ends = threading.Event()
        monkeypatch.setattr(store_of(batcher).store, "get", lambda *block: ends.wait(60) and None)
        assert run(batcher, [prompt(1)]) == (plain, [0])
        ends.set()


def test_a_request_that_is_aborted_while_it_is_read_leaves_nothing(tmp_path, monkeypatch):
    model = shared("llama")
    written(model, tmp_path, [prompt(1)])
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        goes_on, get = threading.Event(), store_of(batcher).store.get
        monkeypatch.setattr(store_of(batcher).store, "get", lambda *block: goes_on.wait(60) and get(*block))
        name = batcher.add_request(prompt(1), max_new_tokens=6)
        batcher.step()
        assert batcher.abort(name)
        assert [output.finish_reason for output in batcher.step()] == ["abort"]
        goes_on.set()
        assert not batcher.has_work
        batcher.pool.check_integrity()
        assert batcher.pool.stats().blocks_used == 0


def test_a_small_pool_that_preempts_and_evicts_gives_the_same_answers(tmp_path):
    model, prompts = shared("llama"), [prompt(seed, 40 + seed) for seed in range(6)] * 2
    plain = run(ContinuousBatcher(model, **SIZES), prompts)[0]
    sizes = SIZES | {"num_blocks": 30}
    for swap_space in (0, "64KiB"):
        with ContinuousBatcher(model, prefix_store=tmp_path, swap_space=swap_space, **sizes) as batcher:
            for _ in range(2):
                assert run(batcher, prompts)[0] == plain
            assert store_of(batcher).store.counts.damaged == 0


def test_restored_prefixes_serve_samples_beams_and_prompt_logprobs(tmp_path):
    model = shared("llama")
    written(model, tmp_path, [prompt(1)])
    for options in ({"num_beams": 3}, {"n": 3, "do_sample": True, "seed": 7}, {"prompt_logprobs": 1}):
        options = {"max_new_tokens": 6, "do_sample": False} | options
        (plain,) = ContinuousBatcher(model, prefix_sharing=False, **SIZES).generate([prompt(1)], **options)
        with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
            (output,) = batcher.generate([prompt(1)], **options)
            batcher.pool.check_integrity()
        assert output.token_ids == plain.token_ids
        assert [one.token_ids for one in output.sequences] == [one.token_ids for one in plain.sequences]


def test_salts_never_meet(tmp_path):
    model = shared("llama")
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        run(batcher, [prompt(1)], salt="tenant-a")
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        assert run(batcher, [prompt(1)], salt="tenant-b")[1] == [0]
        assert run(batcher, [prompt(1)])[1] == [0]
        assert store_of(batcher).store.counts.read == 0
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        assert run(batcher, [prompt(1)], salt="tenant-a")[1] == [60]


def lora(seed):
    """A model with an adapter "x"."""
    base = make("llama")
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["k_proj", "v_proj"]), adapter_name="x").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def test_adapters_of_one_name_and_other_weights_never_meet(tmp_path):
    plain = {}
    for seed, cached in ((1, [0]), (2, [0]), (1, [60])):
        model = lora(seed)
        with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
            tokens, found = run(batcher, [prompt(1)], adapter="x")
        assert found == cached
        assert plain.setdefault(seed, tokens) == tokens
    assert plain[1] != plain[2]


def test_a_disk_that_takes_nothing_fails_no_request(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hfpaged.prefix_store.write_file", fail)
    model = shared("llama")
    plain = run(ContinuousBatcher(model, **SIZES), [prompt(1), prompt(2)])[0]
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        assert run(batcher, [prompt(1), prompt(2)])[0] == plain
        assert store_of(batcher).writer.flush(60)
        assert store_of(batcher).store.counts.dropped > 0
    assert list(tmp_path.iterdir()) == []


def test_what_restoring_does_not_pay_for_is_computed_and_measured_again_later(tmp_path, monkeypatch):
    model = shared("llama")
    written(model, tmp_path, [prompt(1)])
    monkeypatch.setattr("hfpaged.restore_costs.RestoreCosts.pays", lambda costs, tokens, sizes: sizes["below"] == 0)
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        assert run(batcher, [prompt(1)])[1] == [0]
        assert store_of(batcher).store.counts.read == 0
    with ContinuousBatcher(model, prefix_store=tmp_path, **SIZES) as batcher:
        batcher.pool.swapping._fetched = time.monotonic() - 1000
        get = store_of(batcher).store.get
        monkeypatch.setattr(store_of(batcher).store, "get", lambda *block: time.sleep(0.02) or get(*block))
        assert run(batcher, [prompt(1)])[1] == [60]
        assert batcher.pool.swapping.costs.bytes_per_second("below") > 0


def test_what_cannot_be_is_refused(tmp_path):
    model = shared("llama")
    with pytest.raises(InvalidConfigError, match="prefix_sharing=False"):
        ContinuousBatcher(model, prefix_store=tmp_path, prefix_sharing=False, **SIZES)
    with pytest.raises(InvalidConfigError, match="at least 1 MiB"):
        ContinuousBatcher(model, prefix_store=tmp_path, prefix_store_size="1KiB", **SIZES)
    with pytest.raises(InvalidConfigError, match="prefix_store_size='many' is no size"):
        ContinuousBatcher(model, prefix_store=tmp_path, prefix_store_size="many", **SIZES)
    pool = hfpaged.PagedCache(model, num_blocks=8).pool
    with pytest.raises(InvalidConfigError, match="comes too late"):
        hfpaged.PagedCache(model, pool=pool, prefix_store=tmp_path)
    with pytest.raises(InvalidConfigError, match="begin with another's"):
        ContinuousBatcher(build("lfm2"), prefix_store=tmp_path, **SIZES)
