"""How figures are judged and told, without a model."""

from __future__ import annotations

import pytest
from rich.console import Console

from hfpaged.bench import report
from hfpaged.bench.batch_rows import BATCH_ROWS
from hfpaged.bench.catalog import PREFIX_ROWS, ROWS, choose
from hfpaged.bench.quant_rows import QUANT_ROWS
from hfpaged.bench.result import Measured, Outcome, exit_code, published
from hfpaged.bench.serve_rows import SERVE_ROWS
from hfpaged.bench.shape import Shape
from hfpaged.bench.texts import LONGEST, SHORTEST, texts, word_counts
from hfpaged.bench.turns import in_pairs
from hfpaged.errors import InvalidConfigError
from hfpaged.measure import in_turn

ROW = {row.name: row for row in ROWS}


def outcome(name, value, same=True, judged=True):
    row = ROW[name]
    return Outcome(row, row.shape, Measured(value, plain=2.0, paged=3.0, unit="tok/s", same_tokens=same), judged)


@pytest.mark.parametrize(
    ("name", "target", "good", "bad"),
    [
        ("tokens", ">= 100 %", 1.0, 0.999),
        ("decode-short", ">= 1x", 1.0, 0.99),
        ("decode-long", ">= 1.6x", 1.6, 1.59),
        ("decode-batch", ">= 1.4x", 1.4, 1.39),
        ("prefill", ">= 0.95x", 0.95, 0.94),
        ("beam-memory", "<= 45 %", 0.45, 0.451),
        ("waste", "< 4 %", 0.039, 0.04),
        ("bandwidth", ">= 60 %", 0.6, 0.59),
        ("python", "< 5 %", 0.049, 0.05),
    ],
)
def test_targets(name, target, good, bad):
    assert str(ROW[name].target) == target
    assert outcome(name, good).is_met is True
    assert outcome(name, bad).is_met is False
    assert outcome(name, bad, judged=False).is_met is None


def test_values_are_told_as_ratios_or_shares():
    assert ROW["prefill"].target.format(0.951) == "0.95x"
    assert ROW["waste"].target.format(0.0123) == "1.2 %"


def test_all_targets_met_is_one_sentence():
    outcomes = [outcome("tokens", 1.0), outcome("prefill", 1.0)]
    assert report.verdict(outcomes) == "Same tokens as plain transformers; 2 of 2 targets met."
    assert exit_code(outcomes, is_strict=True) == 0


def test_a_missed_target_is_named_and_exits_3_only_where_it_counts():
    outcomes = [outcome("tokens", 1.0), outcome("prefill", 0.5)]
    assert report.verdict(outcomes) == "Same tokens as plain transformers; 1 of 2 targets met, missed: prefill."
    assert (exit_code(outcomes, is_strict=False), exit_code(outcomes, is_strict=True)) == (0, 3)


def test_different_tokens_in_one_row_void_the_figures_of_all():
    outcomes = [outcome("tokens", 0.9, same=False), outcome("prefill", 2.0), outcome("waste", 0.01, same=None)]
    assert [shown.measured.value for shown in published(outcomes)] == [0.9, None, None]
    assert report.verdict(outcomes) == "The tokens differ in tokens, so speed and memory are not compared."
    assert exit_code(outcomes, is_strict=True) == 1


def test_a_quick_run_judges_nothing():
    text = report.verdict([outcome("tokens", 1.0, judged=False)])
    assert text.startswith("Same tokens as plain transformers; the sizes of a quick run are too small")


def test_rows_without_tokens_claim_nothing_about_them():
    text = report.verdict([outcome("waste", 0.01, same=None)])
    assert text == "No row compares tokens; 1 of 1 targets met."


@pytest.mark.parametrize(
    ("own", "same", "told"),
    [
        ([], True, "Same tokens as http://a; none that has a target was measured."),
        ([], False, "The texts of http://a differ in http-decode, so that nothing is compared with it."),
        (["prefill"], True, "Same tokens as plain transformers and http://a; 1 of 1 targets met."),
        (
            ["prefill"], False,
            "The texts of http://a differ in http-decode, so that nothing is compared with it. Same tokens as plain "
            "transformers; 1 of 1 targets met.",
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_another_server_is_said_apart(own, same, told):
    row = ROW["http-decode"]
    outcomes = [outcome(name, 1.0) for name in own]
    outcomes.append(Outcome(row, row.shape, Measured(2.0, same_tokens=same, rival="http://a")))
    assert report.verdict(outcomes) == told
    assert report.table(outcomes).title == "Plain transformers or http://a and hfpaged"
    assert report.table(outcomes).columns[2].header == "other side"
    assert exit_code(outcomes, is_strict=True) == (0 if same else 1)


def test_a_row_speaks_of_the_shape_that_was_run():
    assert ROW["decode-batch"].describe() == "decode speed, batch 16, prompt 1024"
    assert ROW["decode-batch"].describe(Shape(2, 64, 8)) == "decode speed, batch 2, prompt 64"


def test_rows_are_chosen_by_name_in_the_order_of_the_table():
    assert [row.name for row in choose("prefill, tokens")] == ["tokens", "prefill"]
    assert [row.name for row in ROWS if row not in choose(None)] == ["http-decode"]
    assert choose(None, has_server=True) == ROWS
    with pytest.raises(InvalidConfigError, match=r"--only http-decode: .* give it by --against URL"):
        choose("tokens,http-decode")


def test_a_prompt_leaves_room_for_the_new_tokens():
    assert Shape(1, 6000, 64).fitted(2048) == Shape(1, 1984, 64)
    assert Shape(1, 6000, 64).fitted(None) == Shape(1, 6000, 64)


@pytest.mark.parametrize("count", [8, 64])
def test_texts_are_all_different_and_of_every_length(count):
    prompts = texts(count)
    lengths = [len(text.split()) for text in prompts]
    assert len(set(prompts)) == count
    assert min(word_counts(count)) == SHORTEST
    assert max(word_counts(count)) == LONGEST
    assert min(lengths) < 10
    assert max(lengths) >= 200


@pytest.mark.parametrize(
    ("values", "told"),
    [((), "n=1"), ((1.5,), "n=1"), ((1.5, 1.25, 2.0), "1.25x to 2.00x, n=3")],
)
def test_a_row_tells_its_spread_and_of_how_many_turns(values, told):
    row = ROW["prefill"]
    measured = Measured(1.5, values=values)
    assert report.spread(Outcome(row, row.shape, measured)) == told
    (record,) = report.as_json({}, [Outcome(row, row.shape, measured)], 0)["rows"]
    assert record["n"] == max(len(values), 1)
    assert record["spread"] == (None if len(values) < 2 else (1.25, 2.0))


def test_a_ratio_of_medians_lies_within_the_spread_of_its_pairs():
    measured = in_pairs((2.0, 4.0, 10.0), (6.0, 4.0, 5.0), "tok/s", True)
    assert measured == Measured(
        1.25, 4.0, 5.0, "tok/s", True, plain_runs=(2.0, 4.0, 10.0), paged_runs=(6.0, 4.0, 5.0), values=(3.0, 1.0, 0.5)
    )
    assert measured.spread == (0.5, 3.0)
    assert in_pairs((2.0,), (4.0,), "tok/s", None).spread is None


def test_sides_are_first_in_turn():
    assert [list(in_turn(number, "ab")) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_each_row_knows_which_way_is_better():
    every = {row.name: row for row in (*ROWS, *PREFIX_ROWS, *BATCH_ROWS, *QUANT_ROWS, *SERVE_ROWS)}
    less = {name for name, row in every.items() if not row.is_more_better}
    assert less == {
        "beam-memory", "waste", "python", "prefill-batch", "prefill-stream", "memory", "first-token", "no-match",
        "swapped", "http-first-token", "overhead", "overhead-256", "telemetry", "telemetry-no-sdk", "gap",
        "int8-ppl-hqq", "int4-ppl-hqq", "int4-ppl-quanto", "int8-bytes-hqq", "int4-bytes-hqq", "int4-bytes-quanto",
        "http", "loop", "between",
    }  # fmt: skip


def test_a_note_that_quotes_a_model_is_no_markup(capsys):
    row = ROW["http-decode"]
    said = "parts after 3 of 9 characters: '[/INST] [bold'"
    measured = Measured(2.0, same_tokens=False, rival="http://[::1]:9", difference=said)
    Console(width=200).print(report.table([Outcome(row, row.shape, measured)]))
    out = capsys.readouterr().out
    assert said in " ".join(out.split())
    assert "http://[::1]:9" in out


def test_withheld_figures_leave_no_runs_behind_and_say_how_tokens_differ():
    row = ROW["prefill"]
    measured = Measured(2.0, 1.0, 2.0, "tok/s", False, "note", (1.0,), (2.0,), (2.0,), "3 of 4 texts are equal")
    (shown,) = published([Outcome(row, row.shape, measured)])
    assert shown.measured == Measured(None, same_tokens=False, note="3 of 4 texts are equal")
