"""Decode steps as recorded forwards: what is padded, copied and cut off, and that the tokens are those without."""

from __future__ import annotations

import logging

import pytest
import tiny_models
import torch
from recording import Capture
from test_batcher_tokens import LENGTHS, NEW, SIZES, alone, batcher_of, checked, greedy, prompts

import hfpaged
from hfpaged.engine import decode_graphs, graph_support
from hfpaged.engine.decode_graphs import DecodeGraphs
from hfpaged.engine.graph_support import graph_sizes, why_no_graphs
from hfpaged.engine.piece import Piece
from hfpaged.errors import InvalidConfigError

PACKED = ("llama", "mistral", "qwen3", "gpt2", "opt", "gemma2", "gpt_oss")
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


class CheckedGraphs(DecodeGraphs):
    """Whose keys stand for no step that is longer or wider than what was recorded."""

    keys = ()

    def _key(self, count):
        key = super()._key(count)
        assert key.size >= count
        assert key.length >= max(seq.length for seq in self._cache._rows.sequences)
        assert all(w >= step.block_tables.shape[1] for w, step in zip(key.widths, self._cache.steps, strict=True))
        self.keys = (*self.keys, key)
        return key


def with_graphs(batcher, most=40, **given):
    """The batcher with graphs that are recorded on the CPU."""
    runner = batcher._parts.runner
    capture = given.pop("capture", Capture())
    arguments = {"longest": 256, "shortest": 16} | given
    runner.graphs = CheckedGraphs(runner.model, runner.cache, capture, graph_sizes(most), **arguments)
    return batcher


def graphs_of(batcher):
    return batcher._parts.runner.graphs


def capture_of(batcher):
    return graphs_of(batcher)._capture


def tokens(outputs):
    return [output.token_ids for output in outputs]


CASES = [(name, size) for name in PACKED for size in SIZES if size == "at once" or name in ("llama", "gemma2")]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_tokens_are_those_of_generate_alone(name, size):
    sizes = SIZES[size]
    if size == "preempted" and name == "gemma2":
        sizes = sizes | {"num_blocks": 32}  # tables for two layer groups
    events = []
    expected = greedy(name)
    batcher = with_graphs(batcher_of(name, hooks=(events.append,), **sizes))
    assert tokens(batcher.generate(prompts(), **GREEDY)) == expected
    assert tokens(batcher.generate(prompts(), **GREEDY)) == expected
    assert not graphs_of(batcher).why_off
    assert capture_of(batcher).repeats > capture_of(batcher).count > 0
    if size == "preempted" and name == "llama":
        assert any(type(event).__name__ == "Preempted" for event in events)
    checked(batcher)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_any_number_of_sequences_is_padded_to_the_next_size(name):
    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    lengths = [1 + 5 * number % 37 for number in range(33)]
    given = prompts(lengths)
    news = [2 + 7 * number % 23 for number in range(33)]  # so that they end one after the other
    expected = [alone(model, prompt, max_new_tokens=new)[0] for prompt, new in zip(given, news, strict=True)]
    batcher = with_graphs(batcher_of(name, block_size=4, num_blocks=900))
    for count in (1, 2, 3, 5, 8, 9, 17, 32, 33):
        configs = [GREEDY | {"max_new_tokens": new} for new in news[:count]]
        assert tokens(batcher.generate(given[:count], configs)) == expected[:count], count
    assert {key.size for key in graphs_of(batcher).graphs} == {1, 2, 4, 8, 16, 32, 40}
    checked(batcher)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_contexts_that_outgrow_their_tables_go_on_in_wider_ones(name):
    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    expected = [alone(model, prompt, max_new_tokens=90)[0] for prompt in prompts((3, 30))]
    batcher = with_graphs(batcher_of(name, block_size=2, num_blocks=900))
    outputs = batcher.generate(prompts((3, 30)), max_new_tokens=90, do_sample=False)
    assert tokens(outputs) == expected
    keys = graphs_of(batcher).graphs
    assert {key.length for key in keys} == {32, 64, 128}
    assert {key.widths[-1] for key in keys} == ({16} if name == "mistral" else {16, 32, 64})  # mistral's window is 24
    assert capture_of(batcher).count == len(keys)
    checked(batcher)


@pytest.mark.parametrize("worth", [0, decode_graphs.SHARED_BYTES])
def test_a_long_common_prefix_may_be_worth_more_than_a_graph(worth, monkeypatch):
    monkeypatch.setattr(decode_graphs, "SHARED_BYTES", worth)
    model = tiny_models.shared("llama")
    hfpaged.unpatch(model)
    (common,) = prompts((60,))
    given = [[*common, token, token + 1] for token in range(5, 10)]
    expected = [alone(model, prompt)[0] for prompt in given]
    batcher = with_graphs(batcher_of("llama", block_size=4))
    assert tokens(batcher.generate(given, **GREEDY)) == expected
    assert sum(output.num_cached_tokens for output in batcher.generate(given, **GREEDY)) > 4 * 60
    assert capture_of(batcher).repeats <= 1 if worth == 0 else capture_of(batcher).repeats > NEW  # 1: of one alone
    checked(batcher)


MODES = {
    "samples": {"do_sample": True, "n": 3, "seed": 3, "temperature": 0.8},
    "beams": {"num_beams": 3, "do_sample": False},
    "guesses": {"prompt_lookup_num_tokens": 4, "do_sample": False},
    "prompt_logprobs": {"prompt_logprobs": 1, "do_sample": False},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sequences_that_share_and_copy_blocks_give_what_they_give_without_graphs(name, mode):
    given = [prompt * 2 for prompt in prompts((1, 6, 13))]
    found = []
    for graphs in (False, True):
        batcher = batcher_of(name, block_size=4, num_blocks=600)
        if graphs:
            with_graphs(batcher)
        outputs = batcher.generate(given, max_new_tokens=20, **mode)
        found.append([[seq.token_ids for seq in output.sequences] for output in outputs])
        if graphs:
            assert capture_of(batcher).repeats > 0
        checked(batcher)
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_quantized_pools_store_and_read_the_same(kv_dtype):
    found = []
    for graphs in (False, True):
        batcher = batcher_of("llama", kv_dtype=kv_dtype)
        if graphs:
            with_graphs(batcher)
        found.append(tokens(batcher.generate(prompts(), **GREEDY)))
        checked(batcher)
    assert found[0] == found[1]


def test_all_sizes_can_be_recorded_before_the_first_step():
    batcher = with_graphs(batcher_of("gemma2", block_size=4), most=8, shortest=64)
    graphs_of(batcher).check_model()
    graphs_of(batcher).capture_all()
    assert [key.size for key in graphs_of(batcher).graphs] == [8, 4, 2, 1]
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("gemma2")
    assert capture_of(batcher).count == 4
    assert graphs_of(batcher).describe() == "decode steps of 1, 2, 4, 8 sequences, 4 recorded"
    checked(batcher)


def test_all_blocks_are_there_before_anything_is_recorded_so_that_none_moves_later():
    batcher = with_graphs(batcher_of("llama", num_blocks=500))
    batcher.generate(prompts((5,)), **GREEDY)
    assert {store.num_blocks for store in batcher.pool.storage._stores.values()} == {500}
    count, addresses = capture_of(batcher).count, batcher.pool.storage.addresses
    batcher.generate(prompts((5,)) * 3, **GREEDY)
    assert batcher.pool.storage.addresses == addresses
    assert count == 1
    checked(batcher)


def decoded(batcher, ids, wanted):
    """Logits of one token each, of sequences of their own; `wanted[i]` of sequence i."""
    runner, manager = batcher._parts.runner, batcher.pool.manager
    pieces = [Piece(manager.create(), 0, [token], count) for token, count in zip(ids, wanted, strict=True)]
    logits = runner.forward(pieces)
    for piece in pieces:
        manager.free(piece.blocks)
    return logits


@pytest.mark.parametrize("wanted", [[1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 0]])
def test_logits_are_those_that_somebody_wants_and_stay_when_the_next_step_comes(wanted):
    plain, recorded = batcher_of("llama"), with_graphs(batcher_of("llama"))
    expected = decoded(plain, [5, 6, 7], wanted)
    logits = decoded(recorded, [5, 6, 7], wanted)
    decoded(recorded, [8, 9, 10], [1, 1, 1])
    assert capture_of(recorded).repeats == 2
    assert logits.shape == (sum(wanted), tiny_models.VOCAB)
    torch.testing.assert_close(logits, expected)
    checked(plain)
    checked(recorded)


def test_a_model_that_reads_dense_views_is_refused_with_one_sequence_too():
    batcher = with_graphs(batcher_of("falcon"), most=1)
    graphs_of(batcher).capture_all()
    assert graphs_of(batcher).why_off.startswith("PackedForwardError")
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("falcon")
    checked(batcher)


def test_more_sequences_than_the_largest_size_are_computed_without_a_graph():
    batcher = with_graphs(batcher_of("llama"), most=4)
    configs = [GREEDY | {"max_new_tokens": 3 + number} for number in range(len(LENGTHS))]
    outputs = batcher.generate(prompts(), configs)
    assert tokens(outputs) == [row[: 3 + number] for number, row in enumerate(greedy("llama"))]
    assert {key.size for key in graphs_of(batcher).graphs} == {1, 2, 4}
    checked(batcher)


def test_a_model_that_no_graph_can_hold_goes_on_without_one(caplog):
    def reads(forward):
        forward()
        raise RuntimeError("the forward waits for the device")

    batcher = with_graphs(batcher_of("gemma2"), capture=reads)
    with caplog.at_level(logging.WARNING, "hfpaged"):
        assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("gemma2")
    assert batcher.describe()["graphs"] == "off (RuntimeError: the forward waits for the device)"
    assert [record.getMessage().count("launched kernel by kernel") for record in caplog.records] == [1]
    checked(batcher)


def test_copies_on_write_that_are_due_survive_a_recording_that_fails():
    found = []
    for fails in (False, True):
        batcher = batcher_of("llama", block_size=4)
        if fails:
            with_graphs(batcher, capture=lambda forward: forward() and 1 / 0)
        outputs = batcher.generate(prompts((6, 7)), max_new_tokens=9, do_sample=True, n=4, seed=1)
        found.append([[seq.token_ids for seq in output.sequences] for output in outputs])
        checked(batcher)
    assert found[0] == found[1]


def test_a_forward_that_is_recorded_is_not_told_of_the_step_under_way():
    batcher = with_graphs(batcher_of("llama", block_size=4))
    seen = []

    def capture(forward):
        rows = batcher._parts.runner.cache._rows
        before = [vars(rows)[name] for name in ("steps", "sequences", "length", "past_length", "copies")]
        replay = Capture()(forward)
        seen.append([vars(rows)[name] for name in ("steps", "sequences", "length", "past_length", "copies")] == before)
        return replay

    graphs_of(batcher)._capture = capture
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    assert seen == [True]
    checked(batcher)


def test_blocks_that_move_are_recorded_again():
    batcher = with_graphs(batcher_of("llama"))
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    count = capture_of(batcher).count
    for store in batcher.pool.storage._stores.values():
        for part in (store._key, store._value):
            part.grow(part.num_blocks + 1, 0)
            part.data[:-1].clone()
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    assert capture_of(batcher).count == 2 * count
    checked(batcher)


def test_weights_in_other_places_are_recorded_again_and_those_changed_in_place_are_read():
    model = tiny_models.make("llama")
    other = tiny_models.make("llama")
    for parameter in other.parameters():
        parameter.mul_(1.25)
    expected = [alone(other, prompt)[0] for prompt in prompts()]
    assert expected != greedy("llama")
    batcher = with_graphs(hfpaged.ContinuousBatcher(model, num_blocks=200, prepack=False))
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    count = capture_of(batcher).count
    for parameter in model.parameters():
        parameter.mul_(1.25)
    assert tokens(batcher.generate(prompts(), **GREEDY)) == expected
    assert capture_of(batcher).count == count
    model.load_state_dict({name: tensor / 1.25 for name, tensor in model.state_dict().items()}, assign=True)
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    assert capture_of(batcher).count == 2 * count
    checked(batcher)


def test_a_hook_is_called_at_every_step_so_that_there_are_no_graphs():
    model = tiny_models.make("llama")
    batcher = with_graphs(hfpaged.ContinuousBatcher(model, num_blocks=200, prepack=False))
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert tokens(batcher.generate(prompts(), **GREEDY)) == greedy("llama")
    assert len(calls) == NEW
    assert batcher.describe()["graphs"] == "off (hooks on its modules, which a recorded forward does not call)"
    checked(batcher)


def test_under_autocast_no_step_is_for_a_graph():
    batcher = with_graphs(batcher_of("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        batcher.generate(prompts((5,)), **GREEDY)
    assert capture_of(batcher).repeats == 0
    assert not graphs_of(batcher).why_off
    checked(batcher)


def test_another_adapter_is_recorded_anew():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(tiny_models.make("llama"), lora, "first").eval()
    model.add_adapter("second", lora)
    batcher = with_graphs(hfpaged.ContinuousBatcher(model, num_blocks=200, prepack=False))
    seen = []
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        hfpaged.unpatch(model)
        expected = [alone(model, prompt)[0] for prompt in prompts()]
        seen.append(expected)
        hfpaged.patch(model)
        assert tokens(batcher.generate(prompts(), **GREEDY)) == expected, name
    assert seen[0] != seen[1]
    assert capture_of(batcher).repeats > 2 * NEW
    checked(batcher)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REASONS = {
    "its sequences are computed one by one: read as a tensor": ("falcon", {}, {}),
    "int4 keeps unfilled blocks in residuals": ("llama", {}, {"kv_dtype": "int4"}),
    "its rotary positions depend on lengths": ("llama", {"rope_parameters": DYNAMIC}, {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_where_there_can_be_none_the_reason_is_told(reason):
    name, changes, sizes = REASONS[reason]
    model = tiny_models.make(name, **changes)
    batcher = hfpaged.ContinuousBatcher(model, num_blocks=100, prepack=False, **sizes)
    assert why_no_graphs(batcher._parts.runner, "cpu").startswith(reason)


def test_on_a_cpu_there_are_none(monkeypatch):
    batcher = batcher_of("llama", cuda_graphs=None)
    assert batcher.describe()["graphs"] == "off (the model is on cpu, graphs are made on cuda)"
    assert why_no_graphs(batcher._parts.runner, "cpu") is None
    with monkeypatch.context() as spread:  # there is no second device here
        spread.setattr(graph_support, "single_device", lambda model: None)
        assert why_no_graphs(batcher._parts.runner, "cpu") == "the model is spread over several devices"
    assert batcher_of("llama", cuda_graphs=False).describe()["graphs"] == "off (cuda_graphs=False)"
    with pytest.raises(InvalidConfigError, match="there can be none: the model is on cpu"):
        batcher_of("llama", cuda_graphs=True)
    checked(batcher)


def test_sizes_are_powers_of_two_and_the_most_there_may_be():
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("name", PACKED)
def test_on_a_gpu_tokens_are_those_without_graphs(name):
    model = tiny_models.make(name).to("cuda")
    given = prompts([1 + 5 * number % 37 for number in range(33)])
    configs = [GREEDY | {"max_new_tokens": 2 + 7 * number % 23} for number in range(33)]
    found = []
    for graphs in (False, None):
        batcher = hfpaged.ContinuousBatcher(model, num_blocks=900, block_size=4, cuda_graphs=graphs)
        found.append([tokens(batcher.generate(given[:count], configs[:count])) for count in (1, 3, 9, 33)])
        if graphs is None:
            assert not graphs_of(batcher).why_off
            assert {1, 4, 16, 64} <= {key.size for key in graphs_of(batcher).graphs}
        checked(batcher)
    assert found[0] == found[1]
