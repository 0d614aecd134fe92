"""`hfpaged bench serve`, run quickly on a tiny model, and the parts that it is made of."""

from __future__ import annotations

import json
import sys

import pytest
import tiny_models
import tiny_tokenizers
import torch
from served import served

import hfpaged
from hfpaged import ContinuousBatcher, cli
from hfpaged.bench import serve_load
from hfpaged.bench.batch_workload import endless
from hfpaged.bench.endpoint import Endpoint, EndpointError, reach
from hfpaged.bench.result import Outcome, exit_code, published
from hfpaged.bench.serve_answers import Answer, read_answer
from hfpaged.bench.serve_client import Played, Send, play
from hfpaged.bench.serve_load import Request, Run, Runs, percentile, requests
from hfpaged.bench.serve_processes import elsewhere, openai_body
from hfpaged.bench.serve_rows import SERVE_ROWS
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = Endpoint("http://other", "name", "a secret")
ROW = {row.name: row for row in SERVE_ROWS}
HEAD = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def tiny():
    tokenizer = tiny_tokenizers.byte_level()
    return tiny_models.make("llama", vocab_size=len(tokenizer)).eval(), tokenizer


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("served-model")
    for part in tiny:
        part.save_pretrained(path)
    return str(path)


@pytest.fixture
def setting(tiny):
    yield Setting(*tiny, repeats=1, is_quick=True)
    hfpaged.unpatch(tiny[0])


def chunk(*events):
    data = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return f"{len(data.encode()):x}\r\n{data}\r\n"


def said(text, **more):
    return {"choices": [{"text": text}], **more}


def test_all_rows_are_measured_on_a_model_of_ones_own_and_the_texts_are_the_same(
    folder, warm, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "executable", warm)  # servers and clients
    figures = tmp_path / "figures.json"
    code = cli.main(["bench", "serve", "--quick", "--threads", "1", "--model", folder, "--json", str(figures)])
    shown = capsys.readouterr().out
    record = json.loads(figures.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert (code, record["tokens_agree"]) == (0, True), shown
    assert list(rows) == ["http", "loop", "load", "first-token", "between"]
    for row in rows.values():
        assert row["value"] is not None, row
        assert row["same_tokens"] is True
    for name in ("load", "first-token", "between"):
        assert rows[name]["value"] == pytest.approx(rows[name]["paged"] / rows[name]["plain"])
        assert "2 of 2 texts are equal" in rows[name]["note"]
    assert rows["http"]["value"] == pytest.approx(1 - rows["http"]["paged"] / rows["http"]["plain"])
    assert rows["loop"]["value"] >= 10  # a task that sleeps for 10 ms is not back before


def test_a_model_without_a_tokenizer_is_not_measured_and_says_why(tiny):
    for row in SERVE_ROWS:
        measured = row.load()(Setting(tiny[0], None, 1, True), row.shape.quick())
        assert measured.value is None
        assert "no tokenizer" in measured.note


def test_another_server_is_asked_by_its_name_and_answers_what_the_batcher_says(tiny):
    model, tokenizer = tiny
    prompts = ["the quick brown", "lazy dogs stop"]
    with ContinuousBatcher(model, tokenizer, num_blocks=64) as batcher:
        with served(batcher) as server, elsewhere(reach(f"{server.url}/v1/")) as target:
            assert target.ask("a", 2)["model"] == server.client.get("/v1/models").json()["data"][0]["id"]
            played = play(target.url, [Send(0.01 * number, target.ask(text, 7)) for number, text in enumerate(prompts)])
        with endless(model):
            outputs = batcher.generate(prompts, max_new_tokens=7, do_sample=False)
    assert played.texts == [output.text for output in outputs]
    assert [answer.tokens for answer in played.answers] == [7, 7]
    first, second = played.answers
    assert second.sent - first.sent >= 0.005
    assert all(answer.sent < answer.parts[0][0] <= answer.parts[-1][0] <= answer.end for answer in played.answers)
    assert played.seconds > 0
    assert played.cpu_seconds > 0


def test_a_server_that_refuses_is_an_error_with_its_own_words(tiny):
    with ContinuousBatcher(*tiny, num_blocks=64) as batcher, served(batcher) as server:
        with pytest.raises(RuntimeError, match=r"400 Bad Request.*prompt"):
            play(f"{server.url}/v1/completions", [Send(0.0, openai_body(None)("the " * 5000, 2))])
        with pytest.raises(EndpointError, match="/nothing/v1/models answers 404"):
            reach(f"{server.url}/nothing")


def test_an_answer_is_read_with_the_time_of_the_piece_in_which_each_part_became_whole():
    one, two, rest = (
        chunk(said("Hé")),
        chunk(said("llo"), said("")),
        chunk(said("!", usage=None), "[DONE]") + "0\r\n\r\n",
    )
    usage = chunk({"choices": [], "usage": {"completion_tokens": 3}})
    wire = (HEAD + one + two + usage + rest).encode().decode("latin-1")
    for cut in range(1, len(wire)):
        answer = read_answer(0.5, [(1.0, wire[:cut]), (2.0, wire[cut:])])
        assert (answer.text, answer.tokens, answer.sent, answer.end) == ("Héllo!", 3, 0.5, 2.0)
        ends = [len((HEAD + text).encode()) for text in (one, one + two)]
        assert [when for when, _ in answer.parts[:2]] == [1.0 if cut >= end else 2.0 for end in ends]
    assert answer.first == answer.parts[0][0] - 0.5
    assert len(answer.gaps) == 2


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ("", "answered ''"),
        ("HTTP/1.1 503 Busy\r\n\r\n{}", "503 Busy"),
        (HEAD + chunk({"error": {"message": "boom"}}), "boom"),
        (HEAD + chunk("[DONE]"), "no text"),
    ],
)
def test_what_is_no_good_stream_is_an_error(wire, words):
    with pytest.raises(RuntimeError, match=words):
        read_answer(0.0, [(1.0, wire)])


def test_the_load_is_the_same_each_time_and_no_two_texts_begin_alike(setting):
    shape = Shape(64, 512, 128)
    load = list(requests(setting, shape, 0))
    assert load == list(requests(setting, shape, 0))
    assert load != list(requests(setting, shape, 1))
    lengths = [len(setting.tokenizer(request.prompt)["input_ids"]) for request in load]
    assert 30 <= min(lengths) <= 80
    assert 450 <= max(lengths) <= 514
    assert 16 <= min(request.new for request in load) <= 30
    assert 115 <= max(request.new for request in load) <= 128
    assert len({request.prompt[:5] for request in load}) == 64
    times = [request.at for request in load]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(63 / setting.rate, rel=0.4)


def test_percentiles_are_values_that_were_measured():
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (50, 99, 7)
    assert percentile(values[:64], 99) == 100


def run_of(*texts, tokens=2, start=0.0):
    parts = [[(start + 1.0, text[:1]), (start + 1.5, text[1:])] for text in texts]
    answers = [serve_load_answer(start, each, tokens) for each in parts]
    return Run(Played(answers, 0.1), [Request(0.0, "", 2) for _ in texts])


def serve_load_answer(start, parts, tokens):
    return Answer(start, parts[-1][0], parts, tokens)


@pytest.mark.parametrize(
    ("against", "ours", "is_fair"),
    [
        (None, run_of("ab", "cd"), True),
        (None, run_of("ab", "xd"), False),
        (OTHER, run_of("ab", "cd"), True),
        (OTHER, run_of("ab", "xd"), False),
        (OTHER, run_of("ab", "cd", tokens=1), False),
    ],
)
def test_no_ratio_is_shown_where_the_work_was_not_the_same(tiny, monkeypatch, against, ours, is_fair):
    monkeypatch.setattr(serve_load, "_runs", lambda setting, shape: Runs([run_of("ab", "cd")], [ours]))
    monkeypatch.setattr(serve_load.serve_processes, "obstacle", lambda: None)
    row, shape = ROW["load"], Shape(2, 8, 2)
    measured = row.load()(Setting(*tiny, 1, False, against=against), shape)
    shown = published([Outcome(row, shape, measured)])[0].measured
    assert (shown.value is not None) == is_fair
    assert f"{1 if 'xd' in ours.played.texts else 2} of 2 texts are equal" in shown.note
    assert shown.rival == ("" if against is None else "http://other")
    assert exit_code([Outcome(row, shape, measured)], is_strict=True) == (3 if is_fair else 1)
    assert measured.plain == pytest.approx(4 / 1.5)


@pytest.mark.parametrize("rate", ["0", "-2"])
def test_a_rate_at_which_nothing_comes_is_refused(rate, capsys):
    assert cli.main(["bench", "serve", "--rate", rate]) != 0
    assert "--rate" in capsys.readouterr().err


def test_torch_is_not_asked_for_a_list_of_rows(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--help"])
    shown = capsys.readouterr().out
    for row in SERVE_ROWS:
        assert row.name in shown
    assert torch.__version__ not in shown
