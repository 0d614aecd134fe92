"""`hfpaged bench batch`, run quickly on a tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfpaged
from hfpaged import cli
from hfpaged.bench import batch_continuous, batch_static, batch_throughput
from hfpaged.bench.batch_continuous import continuous, obstacle
from hfpaged.bench.batch_rows import BATCH_ROWS
from hfpaged.bench.batch_static import static
from hfpaged.bench.batch_steps import Steps
from hfpaged.bench.batch_workload import Run, alike, endless, mixed
from hfpaged.bench.catalog import choose
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.target import Target
from hfpaged.engine.events import Preempted, StepFinished
from hfpaged.engine.outputs import RequestOutput

COMMAND = ["bench", "batch", "--quick"]
ROW = {row.name: row for row in choose(None, BATCH_ROWS)}
SHAPE = Shape(6, 48, 16)
POOL = 2048


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=200,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def setting(model):
    with torch.inference_mode():
        yield Setting(model, None, 1, True)
    hfpaged.unpatch(model)
    batch_static.first_runs.cache_clear()


def alone(model, workload):
    """Greedy tokens of each prompt by itself, whatever they are."""
    rows = []
    with endless(model):
        for prompt, new in zip(workload.prompts, workload.new, strict=True):
            output = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
            rows.append(output[0, len(prompt) :].tolist())
    return rows


def test_the_mixed_workload_is_always_the_same_and_reaches_the_lengths_that_it_promises(setting):
    workload = mixed(setting, Shape(32, 128, 64))
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (max(lengths), max(workload.new)) == (128, 64)
    assert min(lengths) >= 8
    assert min(workload.new) >= 4
    assert len(set(lengths)) > 20
    assert workload == mixed(setting, Shape(32, 128, 64))


def test_prompts_that_begin_alike_go_on_differently(setting):
    workload = alike(setting, Shape(5, 40, 8, own=6))
    assert len({tuple(prompt[:40]) for prompt in workload.prompts}) == 1
    assert len({tuple(prompt) for prompt in workload.prompts}) == 5
    assert workload.tokens == 5 * 8


@pytest.mark.parametrize("size", [1, 2, 4, 32])
def test_static_batches_of_any_size_give_each_row_its_own_tokens_and_no_more(setting, size):
    workload = mixed(setting, SHAPE)
    run = static(setting, workload, size)
    assert run.rows == alone(setting.model, workload)
    assert list(map(len, run.rows)) == workload.new


def test_generate_batch_gives_each_request_its_own_tokens_in_the_order_of_the_requests(setting):
    workload = mixed(setting, SHAPE)
    assert continuous(setting, workload, POOL).rows == alone(setting.model, workload)
    assert setting.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("side", [lambda s, w: static(s, w, 4), lambda s, w: continuous(s, w, POOL)])
def test_no_token_ends_an_answer(setting, side):
    workload = mixed(setting, SHAPE)
    first = alone(setting.model, workload)[0][0]
    config = setting.model.generation_config
    config.eos_token_id = first
    try:
        rows = side(setting, workload).rows
        assert config.eos_token_id == first
    finally:
        config.eos_token_id = LlamaConfig().eos_token_id
    assert rows[0][0] == first
    assert list(map(len, rows)) == workload.new


def test_tokens_beyond_a_rows_own_length_count_for_nothing():
    assert Run([[1, 2], [3]], seconds=0.5).speed == 6


def test_a_patched_model_meets_the_rivals_with_its_own_attention(setting):
    hfpaged.patch(setting.model)
    assert obstacle(setting) is None
    static(setting, mixed(setting, SHAPE), 4)
    assert not hfpaged.patching.is_patched(setting.model)


def test_generate_batch_is_not_measured_with_another_attention_than_the_issue_says(setting):
    setting.model.set_attn_implementation("eager")
    try:
        assert "this model uses eager" in (obstacle(setting) or "")
        measured = ROW["generate-batch"].load()(setting, SHAPE)
    finally:
        setting.model.set_attn_implementation("sdpa")
    assert measured.value is None
    assert "not measured" in measured.note


class DeadManager:
    def get_result(self, timeout):
        return None

    def is_running(self):
        return False


def test_a_rival_that_dies_is_an_error_and_no_endless_wait():
    with pytest.raises(RuntimeError, match="ended after 0 of 3 requests"):
        batch_continuous._collect(DeadManager(), 3)


def test_sides_take_turns_and_each_is_first_in_its_turn():
    order = []
    sides = [lambda name=name: order.append(name) or Run([[1]], 1.0) for name in ("theirs", "ours")]
    batch_throughput._in_turns(3, *sides)
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]


def test_the_ratio_is_that_of_medians_and_void_once_any_run_differs():
    theirs, ours = ([Run([[1, 2]], seconds) for seconds in times] for times in ((1, 2, 9), (0.5, 0.25, 0.1)))
    measured = batch_throughput.compared(theirs, ours, "note")
    speeds = {"plain_runs": (2.0, 1.0, 2 / 9), "paged_runs": (4.0, 8.0, 20.0), "values": (2.0, 8.0, 90.0)}
    assert measured == Measured(8.0, 1.0, 8.0, "tok/s", True, "note", **speeds)
    assert (measured.spread, measured.runs) == ((2.0, 90.0), 3)
    wrong = [*ours[:2], Run([[1, 3]], 1)]
    assert batch_throughput.compared(theirs, wrong, "").same_tokens is False
    assert batch_throughput.compared(theirs, ours, "", [[[2, 2]]]).same_tokens is False


def step(sequences, tokens, used=0):
    return StepFinished(
        number=0, num_sequences=sequences, num_tokens=tokens, num_prefill_tokens=tokens - sequences,
        num_sampled=sequences, num_waiting=0, num_running=sequences, preemptions=0, seconds=1.0, forward_seconds=0.0,
        sampling_seconds=0.0, blocks_used=used, blocks_total=10, token_gaps={},
    )  # fmt: skip


def test_steps_before_the_first_preemption_are_known_and_the_first_step_has_no_length():
    watch = Steps()
    for event in (
        step(2, 9, 4),
        step(2, 2, 8),
        step(1, 1, 9),
        Preempted(request_id="a", lost=3, output_tokens=0),
        step(2, 2, 10),
    ):
        watch(event)
    assert [round(found.use, 2) for found in watch.steps] == [0.8, 0.9, 1.0]
    assert (watch.unhurried, watch.preemptions) == (2, 1)
    assert [found.event.blocks_used for found in watch.decoding(2)] == [8, 10]
    assert all(0 < found.bookkeeping < 1 for found in watch.steps)


def run(model, tmp_path, *words):
    folder, path = tmp_path / "model", tmp_path / "figures.json"
    model.save_pretrained(folder)
    code = cli.main([*COMMAND, str(folder), "--json", str(path), *words])
    return code, json.loads(path.read_text())


def test_every_row_is_measured_and_compares_tokens(model, tmp_path, capsys):
    code, figures = run(model, tmp_path)
    assert code == 0, figures["verdict"]
    assert [row["name"] for row in figures["rows"]] == list(ROW)
    assert all(row["same_tokens"] and row["value"] > 0 and row["met"] is None for row in figures["rows"])
    assert f"hfpaged: static (1 of {len(ROW)})" in capsys.readouterr().err


@pytest.fixture
def wrong_tokens(monkeypatch):
    """A batcher whose last new token of each request is another one."""
    token_ids = RequestOutput.token_ids.fget

    def wrong(output):
        tokens = token_ids(output)
        return [*tokens[:-1], tokens[-1] ^ 1] if tokens else tokens

    monkeypatch.setattr(RequestOutput, "token_ids", property(wrong))


@pytest.mark.usefixtures("wrong_tokens")
def test_wrong_tokens_exit_1_and_earn_no_figures_in_any_row(model, tmp_path, capsys):
    code, figures = run(model, tmp_path)
    assert code == 1
    assert all(row["same_tokens"] is False for row in figures["rows"])
    assert all(row[name] is None for row in figures["rows"] for name in ("value", "plain", "paged", "met"))
    assert "tok/s" not in capsys.readouterr().out


def test_a_target_may_count_in_milliseconds():
    target = Target(below=2.0, unit=" ms")
    assert (str(target), target.format(1.234), target.is_met(2.0)) == ("< 2 ms", "1.23 ms", False)


def test_help_lists_the_rows_with_their_targets(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "batch", "--help"])
    out = capsys.readouterr().out
    assert "32 requests at once, prompts to 512, answers to 256, over generate_batch, target >= 2x" in out
    assert "target < 2 ms\n" in out
