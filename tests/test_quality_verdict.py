"""How figures are judged, told and drawn, without a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys

import pytest

from hfpaged.errors import InvalidConfigError
from hfpaged.picture import check_png
from hfpaged.quality import plot, report
from hfpaged.quality.contexts import Context
from hfpaged.quality.figures import Figures
from hfpaged.quality.heads import HeadEffect
from hfpaged.quality.layers import LayerEffect
from hfpaged.quality.limits import parse_limits, share
from hfpaged.quality.report import Report
from hfpaged.quality.thresholds import DEMO_TARGETS, Thresholds
from hfpaged.quality.verdict import exit_code, judge, sentence

SHORT, LONG = Context("short", 128), Context("1k", 1024)


def figures(name="int8", context=SHORT, **changes):
    known = {
        "format": name, "context": context, "scored": 1524, "perplexity_native": 20.0, "perplexity": 20.01,
        "ppl_change": 0.0005, "ppl_error": 0.0002, "kl_mean": 0.0004, "kl_p99": 0.003, "top1": 0.985,
        "generated": 64, "parts_at": 17, "equal_generations": 0.5, "rouge_l": 0.8, "bytes_per_token": 12240.0,
        "bytes_per_sequence": 0, "of_native": 0.266, "of_bfloat16": 0.53,
        "kl_by_position": tuple([0.001] * context.fed),
    }  # fmt: skip
    return Figures(**known | changes)


def judged(*args, is_demo=False, **changes):
    return judge(figures(*args, **changes), Thresholds(), is_demo)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"ppl_change": 0.0101},
            ["perplexity +1.01 % is above +1.00 % by 0.01 points, within its standard error of 0.02 points"],
        ),
        ({"kl_mean": 0.021}, ["KL 0.021 is above 0.02 by 0.001"]),
        ({"top1": 0.89}, ["top-1 89.0 % is below 93 % by 4.00 points"]),
        ({"ppl_change": 0.01, "kl_mean": 0.02, "top1": 0.93}, []),
        ({"ppl_change": -0.5}, []),
        ({"ppl_change": math.nan, "kl_mean": math.nan, "top1": 0.0}, ["perplexity", "KL", "top-1"]),
    ],
)
def test_what_misses_a_threshold_is_said_in_numbers(changes, words):
    misses = Thresholds().misses(figures(**changes))
    assert len(misses) == len(words)
    assert all(str(miss).startswith(word) for miss, word in zip(misses, words, strict=True))


def test_a_user_sets_other_thresholds():
    strict = Thresholds(max_ppl_change=0.0001, max_kl=0.0001, min_top1=0.999)
    assert len(strict.misses(figures())) == 3
    assert (
        Thresholds(max_kl=1, min_top1=0, max_ppl_change=9).misses(figures(kl_mean=0.9, top1=0.01, ppl_change=5)) == []
    )


def test_the_last_line_says_which_formats_are_fit_and_why_the_others_are_not():
    found = [
        judged(),
        judged(context=LONG, kl_mean=0.0009, top1=0.98),
        judged("fp8_e5m2"),
        judged("fp8_e5m2", context=LONG, top1=0.89),
    ]
    assert sentence(found) == (
        "int8 is fit for this model: at worst perplexity +0.05 %, KL 0.0009, top-1 98.0 %, in 27 % of the native "
        "bytes; fp8_e5m2 is not fit for this model: top-1 89.0 % is below 93 % by 4.00 points (1k)."
    )
    assert exit_code(found) == 3
    assert exit_code(found[:3]) == 0


@pytest.mark.parametrize(("text", "value"), [("0.5%", 0.005), ("93 %", 0.93), (" 0%", 0.0), ("-1%", -0.01)])
def test_shares_are_percentages(text, value):
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0.93", "93", "", "%", "many%"])
def test_a_share_without_its_sign_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write a percentage with its sign"):
        share(text)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ppl=0.5%,top1=98%", {"max_ppl_change": 0.005, "min_top1": 0.98}),
        (" kl = 0.01 , rouge=90 %", {"max_kl": 0.01, "min_rouge_l": 0.9}),
        ("ppl=-1%", {"max_ppl_change": -0.01}),
    ],
)
def test_limits_of_a_gate_are_those_named_and_no_others(text, limits):
    assert parse_limits(text) == pytest.approx(limits)
    none = dict.fromkeys(("max_ppl_change", "max_kl", "min_top1", "min_rouge_l"))
    assert dataclasses.asdict(Thresholds.only(parse_limits(text))) == none | parse_limits(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=2", "'speed=2' names no figure; write NAME=LIMIT with one of ppl (at most), kl (at most), top1 (at "),
        ("", "'' names no figure"),
        ("ppl=1%,", "'' names no figure"),
        ("top1=98", "top1=98: '98' is no share; write a percentage with its sign, such as 0.5% (98 could be 98% or "),
        ("top1=0.98", "(0.98 could be 0.98% or 98%)"),
        ("ppl=much", "'much' is no share"),
        ("ppl", "ppl=: '' is no share"),
        ("kl=1%", "kl=1%: '1%' is no number; write nats, as kl=0.01"),
        ("kl=nan", "kl=nan is out of range"),
        ("kl=-1", "KL lies between 0 and any finite number"),
        ("top1=101%", "top1=101% is out of range; top-1 lies between 0% and 100%"),
        ("ppl=inf%", "no share"),
        ("ppl=1%,ppl=2%", "ppl is given twice"),
    ],
)
def test_limits_that_cannot_be_read_are_refused_in_words(text, message):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        parse_limits(text)
    assert message in str(refused.value)


def test_a_limit_decides_in_its_direction_and_only_where_it_is_given():
    gate = Thresholds.only(parse_limits("rouge=85%,kl=0.001"))
    assert gate.misses(figures(top1=0.1, ppl_change=9.0, rouge_l=0.86)) == []
    (miss,) = gate.misses(figures(rouge_l=0.8))
    assert str(miss) == "ROUGE-L 80.0 % is below 85 % by 5.00 points"
    assert gate.misses(figures(rouge_l=0.85, kl_mean=0.001)) == []


def test_failures_are_told_to_machines():
    gate = Thresholds.only(parse_limits("ppl=0.04%,top1=99%"))
    found = Report({}, gate, [judge(figures(), gate, is_demo=False)]).as_json()
    assert found["exit_code"] == 3
    perplexity, top1 = found["failures"]
    assert perplexity == {
        "format": "int8", "context": "short", "name": "ppl", "figure": "ppl_change", "direction": "most",
        "value": 0.0005, "limit": pytest.approx(0.0004), "by": pytest.approx(0.0001), "standard_error": 0.0002,
        "within_standard_error": True,
        "reason": "perplexity +0.05 % is above +0.04 % by 0.01 points, within its standard error of 0.02 points: more "
        "--texts tell",
    }  # fmt: skip
    assert (top1["direction"], top1["by"], top1["standard_error"]) == ("least", pytest.approx(0.005), None)
    assert found["verdict"].endswith("top-1 98.5 % is below 99 % by 0.50 points (short).")


@pytest.mark.parametrize(
    ("name", "reached", "missed"),
    [
        ("int8", (0.53, 0.001, 0.97), (0.531, 0.0011, 0.969)),
        ("fp8_e4m3", (0.53, 0.004, 0.93), (0.531, 0.0041, 0.929)),
        ("k8v4", (0.42, 0.006, 0.93), (0.421, 0.0061, 0.929)),
        ("int4", (0.31, 0.02, 0.91), (0.311, 0.0201, 0.909)),
    ],
)
def test_targets_of_the_demo_model(name, reached, missed):
    names = ("of_bfloat16", "ppl_change", "top1")
    assert judged(name, is_demo=True, **dict(zip(names, reached, strict=True))).target_missed == []
    found = judged(name, is_demo=True, **dict(zip(names, missed, strict=True)))
    assert found.target_missed == ["bytes", "perplexity", "top-1"]
    assert found.target == str(DEMO_TARGETS[name])


def test_targets_are_for_the_demo_model_and_our_formats_only():
    assert judged().target is None
    assert judged("bfloat16", is_demo=True).target is None
    assert len(report.table([judged()]).columns) + 1 == len(report.table([judged(is_demo=True)]).columns)


def test_a_target_that_is_missed_is_printed_and_changes_no_exit_code():
    found = [judged(is_demo=True, of_bfloat16=0.6)]
    assert list(report.table(found).columns[-1].cells) == ["53 %, +0.10 %, 97 %: MISSED bytes"]
    assert exit_code(found) == 0


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_the_table_has_a_line_for_each_length_and_format():
    lines = cells(report.table([judged(), judged("int4", context=LONG, parts_at=None, top1=0.5)]))
    assert lines[0] == (
        "short", "int8", "12,240", "53.0 %", "20.00 -> 20.01", "+0.05 ± 0.02 %", "4.00e-04", "3.00e-03", "98.5 %",
        "token 17", "0.800", "yes",
    )  # fmt: skip
    assert lines[1][:2] == ("1k", "int4")
    assert lines[1][-4:] == ("50.0 %", "none in 64", "0.800", "NO")


def test_what_a_format_keeps_besides_its_blocks_is_said_once():
    found = [
        judged(),
        judged("int4", bytes_per_sequence=737280),
        judged("int4", context=LONG, bytes_per_sequence=737280),
    ]
    assert report.residual_notes(found) == [
        "int4: besides its blocks, 737,280 bytes for each sequence, whose unfilled block stays as it was computed"
    ]


def test_the_five_worst_layers_and_heads_are_shown():
    layers = [LayerEffect(number, 2.0**-number, 0.9) for number in range(9)]
    heads = [HeadEffect(number, 1, 0.01, 0.02, 3.0, 4.5) for number in range(9)]
    assert len(cells(report.layer_table(layers))) == len(cells(report.head_table(heads))) == 5
    assert cells(report.layer_table(layers))[0] == ("0", "1.00e+00", "50.1 %", "90.0 %")
    assert cells(report.head_table(heads))[0] == ("0", "1", "1.00 %", "2.00 %", "3.00", "4.5x")


def test_what_was_cut_is_said():
    line = report.notes([Context("4k", 2048, "cut from 4096 to 2048 tokens, the model's most")], {"4k": 3})
    assert line == [
        "4k: 3 texts of 2048 tokens (cut from 4096 to 2048 tokens, the model's most), 128 of each fed one by one: "
        "384 scored"
    ]


def test_json_has_all_figures_and_none_that_it_has_no_word_for():
    broken = judged(ppl_change=math.nan, perplexity=math.inf, kl_by_position=(math.nan, 1.0))
    found = Report({"model": "tiny"}, Thresholds(), [broken], [LayerEffect(0, 0.1, 0.9)])
    parts = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert set(parts) == {
        "header", "thresholds", "figures", "layers", "heads", "exempting", "failures", "verdict", "exit_code"
    }  # fmt: skip
    (one,) = parts["figures"]
    assert one["ppl_change"] is one["perplexity"] is None
    assert one["kl_by_position"] == [None, 1.0]
    assert one["context"] == {"name": "short", "length": 128, "note": ""}
    assert one["fit"] is False
    assert one["misses"] == ["perplexity +nan % is above +1.00 %"]
    (failure,) = parts["failures"]
    assert failure["value"] is failure["by"] is None
    assert (failure["name"], failure["limit"], failure["within_standard_error"]) == ("ppl", 0.01, False)
    assert (parts["exit_code"], parts["verdict"]) == (3, found.last_line)


def test_lines_of_the_plot_are_means_of_neighbours_at_their_middle():
    kl = tuple(float(number) for number in range(20))
    places, values = plot.points(figures(context=Context("20", 21), kl_by_position=kl))
    assert places == [1 + 3.5, 9 + 3.5, 17 + 1.5]
    assert values == [3.5, 11.5, 17.5]
    _, values = plot.points(figures(context=Context("20", 21), kl_by_position=(0.0,) * 8 + kl[8:]))
    assert math.isnan(values[0])
    assert values[1:] == [11.5, 17.5]


def test_the_plot_is_a_png_with_a_panel_for_each_length(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    plot.draw(one, [figures(), figures("int4")])
    plot.draw(two, [figures(), figures(context=LONG, kl_by_position=(0.0,) * LONG.fed)])
    sizes = [size_of_png(path) for path in (one, two)]
    assert sizes[0][1] == sizes[1][1]
    assert sizes[1][0] == 2 * sizes[0][0]
    assert "matplotlib.pyplot" not in sys.modules


def size_of_png(path):
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(raw[16:20]), int.from_bytes(raw[20:24])


def test_a_plot_that_cannot_be_drawn_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(InvalidConfigError, match=r"only PNG is drawn; give a name that ends with .png"):
        check_png("--plot kl.pdf", "kl.pdf")
    check_png("--plot kl.PNG", "kl.PNG")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidConfigError, match=r"needs matplotlib, which is missing; pip install 'hfpaged\[plot\]'"):
        check_png("--plot kl.png", "kl.png")
