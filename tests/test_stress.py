"""`hfpaged stress` on a tiny model: a sound one is clean, and each thing that is planted is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from quality_model import byte_tokenizer, small_llama
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaModel

from hfpaged import ContinuousBatcher, cli
from hfpaged.block_table import BlockTable
from hfpaged.block_trace import TracedBlockManager
from hfpaged.kv_storage import LayerStore
from hfpaged.stress import load, mix, runner, share, watch
from hfpaged.stress.load import Load
from hfpaged.stress.native import Checker

pytestmark = pytest.mark.usefixtures("one_thread")

POOL = ["--num-blocks", "128", "--block-size", "4", "--max-num-seqs", "16"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    small_llama(max_position_embeddings=512).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def steady(monkeypatch):
    """Seconds go by forwards of the model, so that the same requests come to their end on any machine."""
    forwards, readings = [], count()

    def now():
        return 0.03 * len(forwards) + 0.0005 * next(readings)  # by readings too: nobody may compute any more

    for module in (watch, share):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    hook = register_module_forward_pre_hook(
        lambda module, _: forwards.append(1) if isinstance(module, LlamaModel) else None
    )
    yield
    hook.remove()


@pytest.fixture
def stress(tiny, capsys, steady):
    """Runs the command for so many steady seconds; gives its exit code, its JSON and its last line."""

    def run(seconds, *words):
        code = cli.main(["stress", tiny, "--seconds", str(seconds), "--json", "-", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out), err.rstrip().splitlines()[-1]

    return run


def finding(found, name):
    return next(each for each in found["findings"] if each["name"] == name)


def test_a_sound_model_is_clean_with_a_full_pool(stress, tmp_path):
    plot = tmp_path / "stress.png"
    code, found, line = stress(3, *POOL, "--plot", str(plot))
    assert (code, found["verdict"], found["findings"], found["leaked_blocks"]) == (0, "clean", [], [])
    assert found["pool"]["peak"] >= 0.9
    assert 0 < found["pool"]["full_share"] <= 1
    requests = found["requests"]
    ended = sum(requests[name] for name in ("finished", "aborted", "rejected"))
    assert requests["received"] == ended == sum(requests["kinds"].values())
    assert requests["failed"] == requests["in_flight"] == 0
    assert {"long prompt", "long output", "common prefix"} <= set(requests["kinds"])
    assert found["checked"]["requests"] > 0
    assert found["other_caches"]["rounds"] > 0
    assert all(each["used"] + each["cached"] <= each["total"] for each in found["samples"])
    assert (found["samples"][-1]["used"], found["samples"][-1]["total"]) == (0, 128)
    assert line.startswith(f"clean: {requests['received']} requests in ")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_quantized_pools_are_held_against_the_same_format_alone(stress, fmt):
    _, found, _ = stress(1, *POOL, "--kv-dtype", fmt)
    assert found["header"]["kv_format"] == fmt
    assert found["checked"]["requests"] > 0
    assert not {"wrong", "leak", "failed", "counters"} & {each["name"] for each in found["findings"]}


def test_a_sequence_that_is_never_freed_is_a_leak_with_its_request_and_history(stress, monkeypatch):
    free, forgotten = TracedBlockManager.free, []

    def forget_one(self, sequence):
        if not forgotten and sequence.length > 20 and "req" in self.holder(sequence).name:
            forgotten.append((self.holder(sequence).name, list(sequence.tables[0].blocks)))
        else:
            free(self, sequence)

    monkeypatch.setattr(TracedBlockManager, "free", forget_one)
    code, found, line = stress(1.5, *POOL)
    ((name, blocks),) = forgotten
    assert (code, found["verdict"]) == (1, "leak")
    assert sorted(each["block"] for each in found["leaked_blocks"]) == sorted(blocks)
    for each in found["leaked_blocks"]:
        assert f"({name})" in each["holders"][0]
    # Of a block that others have in common the last transitions may all be of these.
    assert any(name in step for each in found["leaked_blocks"] for step in each["history"])
    assert line.startswith(f"leak: {len(blocks)} of 128 blocks are still held")


def test_a_block_that_is_not_released_breaks_the_books_and_is_named(stress, monkeypatch):
    trim, lost = BlockTable.trim, []

    def lose_one(self, length):
        if not lost and length == 0 and len(self.blocks) > 3 and self._pool.refcount(self.blocks[-1]) == 1:
            lost.append(self.blocks.pop())
        trim(self, length)

    monkeypatch.setattr(BlockTable, "trim", lose_one)
    code, found, _ = stress(1.5, *POOL)
    assert (code, found["verdict"]) == (1, "leak")
    assert "the books of the pool do not agree" in finding(found, "leak")["text"]
    (suspect,) = finding(found, "leak")["suspects"]
    assert suspect.startswith(f"block {lost[0]}: ")
    assert "allocate by sequence" in suspect


def test_memory_that_grows_with_each_request_is_growth(stress, monkeypatch):
    ended, kept = Load._ended, []

    def keep(self, output):
        kept.append([bytearray(b"x") * 2**22, *([] for _ in range(200))])
        ended(self, output)

    monkeypatch.setattr(Load, "_ended", keep)
    # Freed memory in which all of that would find its place, without one page more.
    freed = [bytearray(b"x") * 2**16 for _ in range(10_000)]
    del freed[1:-1]
    code, found, line = stress(4, *POOL)
    assert (code, found["verdict"]) == (1, "growth")
    slope = found["memory"]["resident"]
    assert slope["bytes_per_request"] > 2**21
    assert any("objects of type list" in suspect for suspect in finding(found, "growth")["suspects"])
    assert line.startswith("growth: resident memory grows by")


def test_a_pool_that_is_too_small_thrashes(stress, monkeypatch):
    # Long answers alone, of which nobody knows how long they get, and nothing that is preempted is found again.
    monkeypatch.setattr(mix, "WEIGHTS", {"long output": 1})
    monkeypatch.setattr(load, "FILLING", 0.0)
    how = {"prefix_sharing": False, "preemption": "last_come"}
    monkeypatch.setattr(runner, "ContinuousBatcher", partial(ContinuousBatcher, **how))
    code, found, _ = stress(2, "--num-blocks", "48", "--block-size", "4", "--max-num-seqs", "48", "--length", "60")
    assert code == 1
    assert "thrash" in [each["name"] for each in found["findings"]]
    assert found["tokens"]["recomputed_share"] > 0.15
    assert found["preemptions"] > 10
    assert "--max-num-seqs" in finding(found, "thrash")["remedy"]


def test_wrong_keys_and_values_are_wrong_tokens(stress, monkeypatch):
    write, run, calls = LayerStore.write, Load.run, []

    def spoil(self, key, value, step):
        calls.append(1)
        write(self, key, value * 3 if len(calls) % 5 == 0 else value, step)

    def spoil_and_run(self):  # and not before: the batcher has a look at what the model computes
        monkeypatch.setattr(LayerStore, "write", spoil)
        run(self)

    monkeypatch.setattr(Load, "run", spoil_and_run)
    code, found, line = stress(1.5, *POOL)
    assert (code, found["verdict"]) == (1, "wrong")
    assert found["checked"]["differences"]
    assert "logits better" in found["checked"]["differences"][0]
    assert line.startswith("wrong: ")


def test_answers_that_end_early_are_wrong_tokens(stress, monkeypatch):
    offer = Checker.offer

    def shorten(self, request, prompt, tokens, asked):
        offer(self, request, prompt, tokens[:-1], asked)

    monkeypatch.setattr(Checker, "offer", shorten)
    _, found, line = stress(1, *POOL, "--no-debug")
    assert found["checked"]["requests"] == len(found["checked"]["differences"]) > 0
    assert "it ended before new token" in found["checked"]["differences"][0]
    assert line.startswith("wrong: ")


def test_a_request_that_nobody_computes_is_not_clean(stress, monkeypatch):
    step, lost = Load._step, []

    def step_and_lose(self):
        step(self)
        waiting = self._batcher._parts.scheduler.waiting
        if len(waiting) and not lost:
            (group,) = lost[:] = [next(iter(waiting))]
            waiting.discard(group)
            self._aborts.pop(group.request.request_id, None)

    monkeypatch.setattr(Load, "_step", step_and_lose)
    code, found, _ = stress(1, *POOL, "--no-debug")
    assert code == 1
    assert found["requests"]["stuck"] == len(lost) == 1
    assert "1 of" in finding(found, "failed")["text"]


def test_a_request_that_fails_is_told_with_its_error(stress, monkeypatch):
    add = Load._add

    def add_one_bad(self, attempt):
        if self.counts.received == 5:
            attempt.settings["logits_processor"] = [lambda ids, scores: scores * float("nan")]
        add(self, attempt)

    monkeypatch.setattr(Load, "_add", add_one_bad)
    code, found, _ = stress(1, *POOL, "--no-debug")
    assert code == 1
    assert found["requests"]["failed"] == 1
    assert "NaN" in finding(found, "failed")["suspects"][0]


def test_ctrl_c_tells_the_verdict_so_far(stress, monkeypatch):
    fill, calls = Load._fill, []

    def interrupt(self):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        fill(self)

    monkeypatch.setattr(Load, "_fill", interrupt)
    code, found, line = stress(60, *POOL)
    assert (code, found["exit_code"], found["interrupted"]) == (130, 130, True)
    assert found["leaked_blocks"] == []
    assert "until it was interrupted" in line
    assert "counters" not in {each["name"] for each in found["findings"]}


def test_a_pool_that_was_never_full_proves_nothing(stress):
    code, found, line = stress(1, "--num-blocks", "2000", "--max-num-seqs", "2", "--context", "16", "--no-debug")
    assert (code, found["verdict"]) == (1, "unfilled")
    assert "below 90 % nothing is proven" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "0 seconds stress nothing"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 stresses nothing"),
        (["--model", "other"], "both name a model"),
        (["--json", "no/such/folder/x.json"], "its folder does not exist"),
        (["--plot", "x.jpg"], "only PNG is drawn"),
        (["--kv-dtype", "int3"], "kv_dtype='int3' is not known"),
        (["--num-blocks", "9", "--memory", "1MiB"], "give one"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(tiny, capsys, words, said):
    assert cli.main(["stress", tiny, *words]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("hfpaged: error: ")
    assert said in err


def test_help_tells_verdicts_and_exit_codes_and_imports_no_torch():
    code = (
        "import sys; from hfpaged import cli\n"
        "try: cli.main(['stress', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for word in ("thrash", "exit codes: 0 when clean", "130 after Ctrl-C", "--no-debug"):
        assert word in shown
