"""`hfpaged plan MODEL --for serve`: a line that `hfpaged serve` understands, and starts with."""

from __future__ import annotations

import json
import shlex
import signal

import forked
import pytest
import serve_models
import tiny_models
from plan_cases import config
from product import PATIENCE
from served import wait_until

from hfpaged import cli


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "config.json"
    found.write_text(json.dumps(config()), encoding="utf-8")
    return str(found)


def line_for(capsys, *words):
    """The exit code, the one line, and what was said besides."""
    code = cli.main(["plan", *map(str, words), "--for", "serve"])
    printed = capsys.readouterr()
    assert printed.out.count("\n") == (1 if code == 0 else 0)
    return code, shlex.split(printed.out), printed.err


def planned(capsys, *words):
    assert cli.main(["plan", *map(str, words), "--json"]) == 0
    return capsys.readouterr().out


def parsed(words):
    """As `hfpaged serve` reads it."""
    assert words[:2] == ["hfpaged", "serve"]
    return cli.build_parser(words[1:]).parse_args(words[1:])


def test_all_that_was_planned_is_in_the_line(capsys, path):
    words = "--device 80GB --utilization 0.9 --dtype bfloat16 --context 4K -n 8 --kv-dtype int8 --block-size 32 " \
            "--token-budget 2048"  # fmt: skip
    code, line, said = line_for(capsys, path, *words.split())
    assert code == 0
    args = parsed(line)
    assert (args.model, args.dtype, args.max_model_len, args.max_num_seqs) == (path, "bfloat16", 4096, 8)
    assert (args.kv_cache_dtype, args.block_size, args.max_num_batched_tokens) == ("int8", 32, 2048)
    assert (args.gpu_memory_utilization, args.kv_cache_memory, args.device) == (0.9, None, None)
    assert "fits: 8 requests" in said


def test_what_the_line_does_not_say_is_said_beside_it(capsys, path):
    _, line, said = line_for(capsys, path, "--device", "80GB", "--context", 512)
    assert parsed(line).max_num_seqs == 128
    assert "say --concurrency" in said
    _, _, said = line_for(capsys, path, "--device", "80GB", "--context", 512, "-n", 150)
    assert "say --concurrency" not in said
    _, _, said = line_for(capsys, path, "--device", "80GB", "--context", "16K")
    assert "--context 16,384 is beyond the 8,192 positions of the config" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [("--for serve --replay trace.jsonl", "use one of the two"), ("--for serve --sweep", "use one of the two"),
     ("--over pool=1GiB", "add --replay"), ("--cost a=1", "add --replay"), ("--requests 5", "add --replay")],
)  # fmt: skip
def test_no_flag_is_passed_over(capsys, path, words, said):
    assert cli.main(["plan", path, *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_without_a_number_as_many_as_fit_and_no_more_than_serve_takes_by_itself(capsys, path):
    few = parsed(line_for(capsys, path, "--device", "24GiB", "--context", 1024)[1])
    assert 1 < few.max_num_seqs < 128
    assert parsed(line_for(capsys, path, "--device", "h200", "--context", 64)[1]).max_num_seqs == 128


def test_a_plan_for_a_cpu_is_served_on_a_cpu(capsys, path):
    code, line, _ = line_for(capsys, path, "--device", "cpu", "--kv-cache-memory", "8GiB")
    assert code == 0
    args = parsed(line)
    assert (args.device, args.kv_cache_memory, args.gpu_memory_utilization) == ("cpu", 8 << 30, None)


def test_what_does_not_fit_gets_the_cheapest_way_out_that_changes_no_token(capsys, path):
    code, line, said = line_for(capsys, path, "--device", "24GiB", "--context", 2048, "-n", 32)
    assert code == 0
    args = parsed(line)
    assert args.max_num_seqs < 32
    assert (args.kv_cache_dtype, args.max_model_len) == ("auto", 2048)
    assert "does not fit: 32 requests" in said
    assert f"recommended with {args.max_num_seqs} requests at once instead of 32" in said


def test_where_no_flag_helps_nothing_is_printed(capsys, path):
    code, line, said = line_for(capsys, path, "--device", "24GiB", "--weights", "140GB")
    assert (code, line) == (1, [])
    assert "no flags of `hfpaged serve` help" in said


def test_a_server_starts_with_the_line_and_has_the_sizes_of_the_plan(capsys, tmp_path):
    tokens = serve_models.tokenizer()
    model = tiny_models.make("llama", vocab_size=len(tokens))
    for part in (model, tokens):
        part.save_pretrained(tmp_path)
    words = ("--device", "cpu", "--kv-cache-memory", "2MiB", "--context", "64", "-n", "4", "--kv-dtype", "int8")
    code, line, _ = line_for(capsys, tmp_path, *words)
    assert code == 0
    layout = json.loads(planned(capsys, tmp_path, *words))
    blocks = layout["memory"]["pool_bytes"] // layout["kv"]["block_bytes"]
    told = tmp_path / "told"
    process = forked.start(["-m", *line, "--port", "0"], forked.shared_environment(), told)
    try:
        wait_until(lambda: "ready: " in told.read_text() or process.poll() is not None, PATIENCE, 0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, told.read_text()
    finally:
        process.kill()
    assert "ready: " in told.read_text()
    assert f"{blocks} blocks of 16 tokens" in told.read_text()
    assert "up to 4 sequences" in told.read_text()
