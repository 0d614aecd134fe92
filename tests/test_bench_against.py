"""`hfpaged bench KIND --against URL`: the same requests to another server, ours in its place or a bad one."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
from bad_servers import MODELS, answering, tiny_with_chat
from served import served

from hfpaged import ContinuousBatcher, cli
from hfpaged.bench import against, against_form, endpoint
from hfpaged.bench.against_form import FORMS
from hfpaged.bench.against_texts import judge
from hfpaged.bench.batch_workload import Workload
from hfpaged.bench.catalog import ROWS
from hfpaged.bench.endpoint import Endpoint, EndpointError, reach
from hfpaged.bench.kinds import KINDS
from hfpaged.bench.result import Measured, Outcome, published
from hfpaged.bench.serve_answers import Answer
from hfpaged.bench.serve_client import Played
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = list(range(5, 25))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(endpoint.KEY_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny():
    return tiny_with_chat()


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    for part in tiny:
        part.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def same(tiny):
    """A server with the same model."""
    with ContinuousBatcher(*tiny, num_blocks=256) as batcher, served(batcher) as server:
        yield server


@pytest.fixture(scope="module")
def other(tiny):
    """A server with a model of the same sizes and other weights."""
    model = tiny_models.make("llama", vocab_size=len(tiny[1])).eval()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    with ContinuousBatcher(model, tiny[1], num_blocks=256) as batcher, served(batcher) as server:
        yield server


def run(kind, folder, url, tmp_path, *words):
    path = tmp_path / "figures.json"
    code = cli.main(["bench", kind, "--quick", folder, "--against", url, "--json", str(path), *words])
    return code, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("kind", "rows", "form"),
    [
        ("generate", "http-decode", FORMS[4]),
        ("prefix", "http-first-token", FORMS[3]),
        ("batch", "http-batch", FORMS[0]),
    ],
)
def test_a_server_with_the_same_model_is_compared_by_http_on_both_sides(
    kind, rows, form, folder, same, tmp_path, capsys, monkeypatch
):
    if form is not FORMS[0]:
        monkeypatch.setattr(against_form, "FORMS", [form])
    code, figures = run(kind, folder, f"{same.url}/v1", tmp_path, "--only", rows, "--repeats", "2")
    assert code == 0, figures
    assert [row["name"] for row in figures["rows"]] == rows.split(",")
    for row in figures["rows"]:
        assert row["same_tokens"] is True
        assert row["value"] == pytest.approx(row["paged"] / row["plain"])
        assert (row["n"], len(row["plain_runs"]), len(row["paged_runs"])) == (2, 2, 2)
        count = 2 * row["shape"]["batch"]
        assert row["note"].startswith(
            f"HTTP on both sides, {form.name}; {count} of {count} texts are equal; theirs is "
        )
        assert row["rival"] == same.url
    assert figures["verdict"].startswith(f"Same tokens as {same.url}; ")
    assert same.url in figures["header"]["against"]
    assert capsys.readouterr().out.splitlines()[-1] == figures["verdict"]


def test_another_model_earns_no_ratio_and_the_rows_in_process_keep_theirs(folder, other, tmp_path, capsys):
    code, figures = run("generate", folder, other.url, tmp_path, "--only", "decode-short,http-decode")
    assert code == 1
    inside, http_row = figures["rows"]
    assert inside["value"] > 0
    assert http_row["same_tokens"] is False
    assert all(http_row[name] is None for name in ("value", "plain", "paged", "spread"))
    assert http_row["plain_runs"] == http_row["paged_runs"] == http_row["values"] == []
    assert "0 of 1 texts are equal; one parts after" in http_row["note"]
    assert "float32 on both sides" in http_row["note"]
    assert figures["verdict"].startswith(f"The texts of {other.url} differ in http-decode, so that nothing is compared")
    assert "tokens differ" in capsys.readouterr().out


def test_the_key_goes_to_the_server_and_nowhere_else(folder, tiny, tmp_path, capsys, monkeypatch):
    seen = []

    def answer(handler):
        seen.append(handler.headers["Authorization"])
        handler.say(*((200, MODELS) if handler.command == "GET" else (500, {})))

    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    path = tmp_path / "figures.json"
    with answering(answer) as url:
        words = ["bench", "generate", "--quick", folder, "--against", url, "--json", str(path)]
        assert cli.main([*words, "--only", "waste,http-decode", "--against-key", "given-by-hand"]) == 2
        captured = capsys.readouterr()
        reach(url)
    assert seen[0] == "Bearer given-by-hand"
    assert seen[-1] == "Bearer of-the-environment"
    told = captured.out + captured.err + path.read_text() + repr(reach.__doc__)
    assert "given-by-hand" not in told
    assert "given-by-hand" not in repr(Endpoint("http://a", "b", "given-by-hand"))


def test_a_server_that_fails_in_the_middle_is_one_line_after_the_rows_that_are_done(folder, tmp_path, capsys):
    def answer(handler):
        handler.say(*((200, MODELS) if handler.command == "GET" else (500, {"error": "no more memory"})))

    with answering(answer) as url:
        path = tmp_path / "figures.json"
        words = ["bench", "generate", "--quick", folder, "--against", url, "--json", str(path)]
        assert cli.main([*words, "--only", "waste,http-decode"]) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("Stopped by an error after 1 of 2 rows.")
    assert "500 Internal Server Error" in captured.err.splitlines()[-1]
    assert "no more memory" in captured.err.splitlines()[-1]
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["waste"]


def played(*texts, tokens=None):
    return Played([Answer(0.0, 2.0, [(1.0, text)], tokens) for text in texts], 0.1)


@pytest.mark.parametrize(
    ("form", "theirs", "is_same", "ended_early", "counts", "words"),
    [
        (FORMS[0], played("the fox", "a dog", tokens=4), True, False, [4, 4], "2 of 2 texts are equal"),
        (FORMS[0], played("the fox\ufffd", "a dog", tokens=4), True, False, [4, 4], "2 of 2 texts are equal"),
        (FORMS[0], played("the fox", "a dog"), True, False, [4, 4], "2 of 2 texts are equal"),
        (FORMS[0], played("the fig", "a dog", tokens=4), False, False, [4, 4], "after 5 of 7 characters: 'ig', 'ox'"),
        (FORMS[0], played("the fox", "a dog", tokens=3), True, True, [3, 3], "2 of 2 texts are equal"),
        (FORMS[2], played("the fox", "a dog", tokens=3), True, False, [3, 3], "2 of 2 texts are equal"),
        (FORMS[3], played("the fox", "a dog"), True, False, [2, 2], "2 of 2 texts are equal"),
    ],
)
def test_texts_are_judged_and_tokens_counted(form, theirs, is_same, ended_early, counts, words, tiny):
    verdict = judge(tiny[1], form, [Workload([PROMPT, PROMPT], [4, 4])], [theirs], [played("the fox", "a dog")])
    assert (verdict.is_same, verdict.counts, verdict.ended_early) == (is_same, [counts], ended_early)
    assert words in verdict.told
    assert ("float32 on both sides" in verdict.told) == (not is_same)


def test_a_server_that_overhears_ignore_eos_is_asked_again_with_other_prompts(tiny, monkeypatch):
    asked = []

    def play_turns(setting, endpoint, form, turns):
        asked.append((form.name, endpoint.salt))
        both = [played(*["the fox"] * len(turn.new), tokens=3) for turn in turns[1:]]
        return both, both

    monkeypatch.setattr(against, "_play_turns", play_turns)
    monkeypatch.setattr(against, "form_for", lambda *args: FORMS[0])
    measured = against.batch(Setting(*tiny, 1, True, endpoint_of("a1b2")), Shape(2, 40, 8))
    assert asked == [("token ids", "a1b2"), ("token ids, answers may end", "a1b2a")]
    assert (measured.same_tokens, measured.value, measured.plain) == (True, 1.0, 3.0)


def endpoint_of(salt):
    return Endpoint("http://a", "b", salt=salt)


def test_no_turn_has_a_prompt_that_the_server_knows_from_one_before(tiny):
    shape = Shape(3, 40, 4, own=8)
    prompts = [
        tuple(prompt[:12])
        for salt in ("a1b2", "c3d4")
        for number in range(2)
        for prompt in against._mixed(
            Setting(*tiny, 1, True, Endpoint("http://a", "b", salt=salt)), shape, number
        ).prompts
    ]
    assert len(prompts) == len(set(prompts)) == 12


def test_what_is_warm_is_in_common_to_all_turns_and_the_rest_is_not(tiny):
    setting = Setting(*tiny, 1, True, endpoint_of("a1b2"))
    turns = [against._warm(setting, Shape(1, 40, 1, own=8), number).prompts[0] for number in range(3)]
    assert len({tuple(prompt[:40]) for prompt in turns}) == 1
    assert len({prompt[40] for prompt in turns}) == 3
    (one, other), new = (part := against._alike(setting, Shape(2, 40, 3, own=8), 1)).prompts, part.new
    assert one[:40] == other[:40] != turns[0][:40]
    assert one[40] != other[40]
    assert new == [3, 3]


def test_an_answer_in_one_piece_has_no_speed_of_decoding():
    with pytest.raises(EndpointError, match="5 tokens came in one piece"):
        against._decode_speed(played("all"), [5])
    parts = [(1.0, "a"), (1.5, "b"), (3.0, "c")]
    assert against._decode_speed(Played([Answer(0.0, 3.0, parts, 5)], 0.1), [5]) == 2.0


def test_a_model_without_a_tokenizer_is_not_measured(tiny):
    rows = [row for row in KINDS[-1].rows if row.needs_server]
    assert len(rows) == 4
    for row in rows:
        measured = row.load()(Setting(tiny[0], None, 1, True, Endpoint("http://a", "b")), row.shape.quick())
        assert "no tokenizer" in measured.note


def test_rows_of_one_server_are_void_together_and_leave_those_in_process_alone():
    def outcome(name, same, rival=""):
        row = next(row for row in ROWS if row.name == name)
        return Outcome(row, row.shape, Measured(2.0, same_tokens=same, rival=rival))

    shown = published([outcome("prefill", True), outcome("http-decode", False, "a"), outcome("http-decode", True, "a")])
    assert [one.measured.value for one in shown] == [2.0, None, None]
    shown = published([outcome("prefill", False), outcome("http-decode", True, "a")])
    assert [one.measured.value for one in shown] == [None, None]


def test_quantized_caches_meet_no_server(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "quant", "--against", "http://localhost:9000"])
    assert "--against" in capsys.readouterr().err
