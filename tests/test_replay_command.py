"""`hfpaged plan --replay`: a table, JSON, the knee, and what is known when Ctrl-C comes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from replays import COST

from hfpaged import cli
from hfpaged.planner.knee import find_knee, takes_off
from hfpaged.planner.replay_grid import recorded_variant
from hfpaged.planner.replay_runs import Runs
from hfpaged.planner.trace import Trace, TraceRequest
from hfpaged.planner.variant import Variant

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
GIVEN = "a=0.01,b=1e-4,c=1e-4,d=1e-7"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def trace(tmp_path):
    """Forty requests with one head, three a second, and a line that is none."""
    path = tmp_path / "trace.jsonl"
    lines = [{"format": "hfpaged-trace", "version": 1, "chunk": 16, "started": 0.0}]
    lines += [
        {"arrival": number / 3, "prompt_tokens": 64, "output_tokens": 20, "hashes": [1, 2, 100 + number, 500 + number]}
        for number in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\nnot a request\n")
    return path


def plan(*words):
    return cli.main(["plan", *map(str, words)])


def as_json(capsys, *words):
    assert plan(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_replay_prints_a_table_the_skipped_lines_and_one_last_line(model, trace, capsys):
    words = (model, "--device", "1GiB", "--overhead", "0", "--activations", "1MiB", "--weights", "1MiB")
    assert plan(*words, "--replay", trace, "--cost", GIVEN, "--over", "block-size=8,16,32", "--jobs", 2) == 0
    out = capsys.readouterr().out
    assert "40 requests in 13 s, 2,560 tokens of prompts and 800 of answers" in out
    assert "1 line of the trace could not be read, left out (line 42: it is no JSON" in out
    assert [line.split()[0] for line in out.splitlines() if line.split()[0] in ("8", "16", "32")] == ["8", "16", "32"]
    assert "the queue takes off between" in out.splitlines()[-1] or "the queue stays short up to" in out
    assert out.splitlines()[-1].startswith("best of 3: auto, ")


def test_json_has_each_variant_with_its_figures(model, trace, capsys):
    words = ("--kv-cache-memory", "64KiB", "--replay", trace, "--cost", GIVEN, "--no-knee")
    found = as_json(capsys, model, *words, "--over", "pool=16KiB,64KiB", "--over", "kv-dtype=auto,int8", "--jobs", 1)
    assert [variant["variant"]["kv_format"] for variant in found["variants"]] == ["auto", "int8"] * 2
    assert found["trace"]["skipped"] == 1
    assert found["cost"]["source"] == "given"
    assert not found["interrupted"]
    small, *_, large = found["variants"]
    assert small["variant"]["num_blocks"] < large["variant"]["num_blocks"]
    assert small["hit_rate"] <= large["hit_rate"]
    assert large["hit_tokens"] == 39 * 32
    assert large["finished"] == 40
    assert large["ttft_seconds"]["p50"] > 0
    seconds = {name for name, value in large.items() if isinstance(value, dict) and name != "variant"}
    assert seconds == {"ttft_seconds", "itl_seconds", "queue_seconds", "duration_seconds", "waits_seconds"}
    assert (found["cost"]["step_seconds"], found["cost"]["prefill_token_seconds"]) == (0.01, 1e-4)
    assert found["knee"] is None


def test_what_is_not_replayed_is_said(model, trace, capsys):
    words = (model, "--kv-cache-memory", "64KiB", "--replay", trace, "--cost", GIVEN, "--no-knee", "--requests", 3)
    notes = as_json(capsys, *words, "--swap-space", "1MiB")["notes"]
    assert any("tiers below the pool are left out" in note for note in notes)
    notes = as_json(capsys, *words, "--tp", 2)["notes"]
    assert any("that of each of 2 ranks" in note and "whatever --tp says" in note for note in notes)
    assert not any("left out:" in note or "ranks" in note for note in as_json(capsys, *words)["notes"])


def test_each_rank_has_its_own_heads_in_a_pool_of_its_own(model, trace, capsys):
    words = (model, "--kv-cache-memory", "64KiB", "--replay", trace, "--no-knee", "--requests", 3, "--device", "h100")
    one, two = (as_json(capsys, *words, "--tp", tp) for tp in (1, 2))
    assert two["variants"][0]["variant"]["num_blocks"] == 2 * one["variants"][0]["variant"]["num_blocks"]
    assert two["cost"]["step_seconds"] < one["cost"]["step_seconds"]
    assert any("tell each other takes no time" in note for note in two["notes"])


def test_replicas_and_routers_are_tried_and_each_replica_is_told(model, trace, capsys):
    words = (model, "--kv-cache-memory", "64KiB", "--replay", trace, "--cost", GIVEN, "--no-knee", "--replicas", 2)
    found = as_json(capsys, *words)["variants"]
    assert [each["variant"]["replicas"] for each in found] == [2]
    parts = found[0]["replicas"]
    assert [sum(part[name] for part in parts) for name in ("requests", "finished")] == [40, 40]
    assert sum(part["busy_seconds"] for part in parts) == pytest.approx(2 * found[0]["busy_seconds"])
    lists = ("--over", "replicas=1,3", "--over", "router=prefix,in-turn", "--jobs", 1)
    tried = [each["variant"] for each in as_json(capsys, *words, *lists)["variants"]]
    assert [(each["replicas"], each["router"]) for each in tried] == [(1, "prefix"), (3, "prefix"), (3, "in-turn")]
    assert plan(*words, *lists) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = next(number for number, line in enumerate(lines) if line.startswith("replicas"))
    assert lines[heads].split()[:2] == ["replicas", "router"]
    told = [tuple(line.split()[:2]) for line in lines[heads + 1 : heads + 4]]
    assert told == [("1", "-"), ("3", "prefix"), ("3", "in-turn")]


def test_sizes_of_the_engine_are_tried_too(model, trace, capsys):
    words = ("--kv-cache-memory", "64KiB", "--replay", trace, "--cost", GIVEN, "--no-knee", "--requests", 9)
    lists = ("--over", "max_num_seqs=2,8", "--over", "token-budget=32,64", "--over", "window=none,16")
    found = [each["variant"] for each in as_json(capsys, model, *words, *lists)["variants"]]
    assert [(each["max_num_seqs"], each["max_num_batched_tokens"], each["window"]) for each in found] == [
        (seqs, budget, window) for seqs in (2, 8) for budget in (32, 64) for window in (None, 16)
    ]
    assert found[0]["windows"] == [None]
    assert 16 <= found[1]["windows"][0] < 100


def test_an_assumed_cost_says_so_and_a_measured_one_how_well_it_fits(model, trace, tmp_path, capsys):
    words = (model, "--kv-cache-memory", "64KiB", "--device", "h100", "--no-knee", "--replay")
    assumed = as_json(capsys, *words, trace)
    assert assumed["cost"]["assumed"]
    assert "assumed, not measured" in assumed["cost"]["source"]
    assert any("take no time for granted" in note for note in assumed["notes"])
    steps = [
        {"kind": "step", "prefill": 40 * (n % 3), "decodes": n, "context": n * n,
         "seconds": COST.seconds(40 * (n % 3), n, n * n)}
        for n in range(1, 60)
    ]  # fmt: skip
    measured = tmp_path / "steps.jsonl"
    measured.write_text("\n".join(map(json.dumps, steps)))
    fitted = as_json(capsys, *words, trace, "--cost", measured)["cost"]
    assert fitted["fit"]["r2"] == pytest.approx(1)
    assert fitted["step_seconds"] == pytest.approx(COST.step, rel=1e-3)
    own = tmp_path / "own.jsonl"
    own.write_text(trace.read_text() + measured.read_text())
    assert as_json(capsys, *words, own)["cost"]["fit"]["steps"] == 59
    given = tmp_path / "cost.json"
    given.write_text(json.dumps({"a": 0.02, "d": 1e-7}))
    assert as_json(capsys, *words, trace, "--cost", given)["cost"]["step_seconds"] == 0.02


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--replay", "nowhere.jsonl"), "the trace nowhere.jsonl cannot be read: No such file"),
        (("--replay", "trace", "--over", "size=3"), "'size=3' is none of pool="),
        (("--replay", "trace", "--over", "block-size=24"), "is not a power of two"),
        (("--replay", "trace", "--over", "pool=1MiB", "--over", "pool=2MiB"), "--over says pool twice"),
        (("--replay", "trace", "--over", "router=random"), "'random' is no router; use one of prefix, in-turn"),
        (("--replay", "trace", "--cost", "q=1"), "is none of a=, b=, c= and d="),
        (("--replay", "trace", "--cost", "nowhere"), "is no file that can be read"),
        (("--replay", "trace", "--over", "pool=1KiB"), "has no room for a block"),
        (("--replay", "empty"), "is empty; expected is one JSON object a line"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_said_in_one_line(model, trace, tmp_path, words, told, capsys):
    (tmp_path / "empty").write_text("\n\n")
    named = {"trace": trace, "empty": tmp_path / "empty"}
    try:
        code = plan(model, "--kv-cache-memory", "1MiB", *(named.get(word, word) for word in words))
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


SIZES = {
    "num_blocks": 64, "block_size": 16, "block_bytes": 1024, "windows": [None, 32], "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "max_num_queued_requests": 0x10, "max_step_stretch": None,
}  # fmt: skip


def test_the_sizes_of_the_server_that_recorded_are_replayed_and_compared_with_what_it_measured(model, trace, capsys):
    first, *rest = trace.read_text().splitlines()
    measured = [json.loads(line) | {"hits": 16, "ttft": 0.25} for line in rest[:-1]]
    trace.write_text("\n".join([json.dumps(json.loads(first) | SIZES), *map(json.dumps, measured)]))
    found = as_json(capsys, model, "--kv-cache-memory", "64KiB", "--replay", trace, "--cost", GIVEN, "--no-knee")
    assert found["recorded"]["variant"]["num_blocks"] == 64
    assert found["recorded"]["variant"]["windows"] == [None, 32]
    (note,) = found["notes"]
    assert "(measured 25.0%), TTFT p50" in note
    assert "(measured 250 ms)" in note


@pytest.mark.parametrize(
    "wrong",
    [{"num_blocks": "many"}, {"windows": [None, "x"]}, {"windows": 3}, {"windows": []}, {"max_step_stretch": "no"},
     {"block_size": 24}, {"max_num_seqs": None}, {"watermark": []}, {"max_num_batched_tokens": 1}, {"num_blocks": -1}],
)  # fmt: skip
def test_sizes_that_are_none_are_not_replayed(wrong):
    header = SIZES | wrong
    assert recorded_variant(Trace([TraceRequest(0.0, 3, 3)], 16, header=SIZES)) is not None
    assert recorded_variant(Trace([TraceRequest(0.0, 3, 3)], 16, header=header)) is None


def crowd(count=150, rate=20.0):
    return Trace([TraceRequest(number / rate, 30, 10) for number in range(count)], 16)


def test_the_knee_is_where_the_queue_takes_off_and_slower_arrivals_do_not():
    variant = Variant(100, max_num_seqs=4, max_step_stretch=None)
    runs = Runs(crowd(), COST)
    knee = find_knee(variant, 20.0, runs.run)
    assert knee.fine < knee.off
    slower, faster = runs.run([variant.with_rate(knee.fine / 2), variant.with_rate(knee.off * 2)])
    assert not takes_off(slower)
    assert takes_off(faster)
    assert knee.off / knee.fine < 1.6
    roomy = find_knee(replace(variant, num_blocks=4000, max_num_seqs=64), 20.0, runs.run)
    assert roomy.off is None or roomy.off > knee.off


def test_variants_side_by_side_give_what_they_give_one_by_one():
    variants = [Variant(size, max_num_seqs=8) for size in (10, 20, 40, 80)]
    told = []
    apart = Runs(crowd(), COST, jobs=3, told=told.append).run(variants)
    alone = Runs(crowd(), COST, jobs=1).run(variants)
    assert [replace(each, wall_seconds=0) for each in apart] == [replace(each, wall_seconds=0) for each in alone]
    assert told[-1] == 150 * 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_prints_what_is_known_and_leaves_130(model, tmp_path, jobs):
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for number in range(60_000):
            print(json.dumps({"arrival": number / 9, "prompt_len": 200, "output_len": 200}), file=file)
    words = ["plan", str(model), "--kv-cache-memory", "8MiB", "--replay", str(path), "--cost", GIVEN, "--json"]
    words += ["--over", "block-size=8,16", "--jobs", str(jobs)]
    code = (
        "import sys, threading, time, os, signal\n"
        "from hfpaged import cli\n"
        "from hfpaged.planner import replay_runs\n"
        "tell = replay_runs.Runs._tell\n"
        "def told(runs, count):\n"
        "    tell(runs, count)\n"
        "    if count > 50 and not runs.was_interrupted: os.kill(os.getpid(), signal.SIGINT)\n"
        "replay_runs.Runs._tell = told\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # who runs in the background may ignore it
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, timeout=120
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    found = json.loads(done.stdout)
    assert found["interrupted"]
    assert found["knee"] is None
    assert all(each["was_interrupted"] and each["steps"] > 0 for each in found["variants"])
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_with_a_replay_imports_no_torch(model, trace):
    words = ["plan", str(model), "--kv-cache-memory", "64KiB", "--replay", str(trace), "--no-knee", "--jobs", "1"]
    code = f"import sys; from hfpaged import cli; cli.main({words!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_broken_process_is_said_and_does_not_hang(monkeypatch):
    monkeypatch.setattr("hfpaged.planner.replay_runs.replay", lambda *given: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="ended without an answer"):
        Runs(crowd(3), COST, jobs=2).run([Variant(10), Variant(20)])


def written(tmp_path, *requests):
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def test_where_requests_can_never_fit_no_queue_is_said_to_be_short(model, tmp_path, capsys):
    few = [{"arrival": number, "prompt_tokens": 64, "output_tokens": 20} for number in range(20)]
    words = ("--replay", written(tmp_path, *few), "--cost", GIVEN, "--jobs", 1)
    found = as_json(capsys, model, "--kv-cache-memory", "8KiB", *words)  # 2 blocks of 16 tokens
    assert (found["variants"][0]["too_long"], found["knee"]) == (20, None)
    assert found["verdict"] == "20 of 20 requests can never fit this pool"
    found = as_json(capsys, model, *words, "--no-knee", "--over", "pool=8KiB,64KiB,128KiB")
    assert "the queue stays short from a pool of 256 tokens on" in found["verdict"]


def test_requests_that_come_all_at_once_have_no_rate_and_no_knee(model, tmp_path, capsys):
    burst = [{"arrival": 5.0, "prompt_tokens": 64, "output_tokens": 20}] * 30
    words = ("--kv-cache-memory", "64KiB", "--replay", written(tmp_path, *burst), "--cost", GIVEN, "--jobs", 1)
    found = as_json(capsys, model, *words)
    assert found["knee"] is None
    assert found["verdict"] == "the queue takes off at the rate of the trace"


def test_the_rate_of_the_knee_is_that_of_the_requests_it_was_looked_for_with(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hfpaged.planner.knee.REQUESTS", 11)
    fast_then_slow = [*range(11), *range(1000, 2000, 100)]
    requests = [{"arrival": float(second), "prompt_tokens": 64, "output_tokens": 20} for second in fast_then_slow]
    words = ("--kv-cache-memory", "64KiB", "--replay", written(tmp_path, *requests), "--cost", GIVEN, "--jobs", 1)
    assert as_json(capsys, model, *words)["knee"]["requests_per_second"] == pytest.approx(1.1)
