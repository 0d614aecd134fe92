"""What the doctor reads: expositions, histograms, differences, and the simulation of block sizes."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exposition import HEALTHY, exposition
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from hfpaged import doctor
from hfpaged.doctor import Diagnosis, Finding, derived, diagnose, histogram, rules
from hfpaged.doctor.examination import examine
from hfpaged.doctor.exposition import PREFIX, parse
from hfpaged.doctor.reading import Lacks, Reading
from hfpaged.doctor.report import as_json
from hfpaged.doctor.rules.fragmentation import SIZES, waste
from hfpaged.doctor.words import duration, number, percent, plural, round_down, round_up
from hfpaged.errors import MetricsError
from hfpaged.telemetry.catalog import BY_NAME

LENGTH_BUCKETS = BY_NAME["hfpaged_sequence_tokens"].buckets


def reading(text, model_name="tiny"):
    return Reading.of(parse(text), model_name)


def made_of(values, bounds):
    counts = [sum(value <= bound for value in values) for bound in (*bounds, math.inf)]
    return histogram.Histogram((*bounds, math.inf), tuple(map(float, counts)), float(sum(values)))


def test_it_reads_the_text_of_prometheus_and_openmetrics_alike():
    registry = CollectorRegistry()
    preemptions = Counter("hfpaged_preemptions", "Times.", ["model_name"], registry=registry)
    preemptions.labels("tiny").inc(3)
    steps = Histogram("hfpaged_step_duration_seconds", "Steps.", ["model_name"], registry=registry, buckets=(1, 2))
    for seconds in (0.5, 1.5, 5):
        steps.labels("tiny").observe(seconds)
    for text in (generate_latest(registry).decode(), generate_openmetrics(registry).decode()):
        found = reading(text)
        assert found.total("hfpaged_preemptions_total") == 3
        steps = found.histogram("hfpaged_step_duration_seconds")
        assert (steps.bounds, steps.cumulative, steps.sum) == ((1, 2, math.inf), (1, 2, 3), 7)


def test_other_metrics_windows_lines_and_a_byte_order_mark_do_not_disturb():
    text = "\ufeff# TYPE python_info gauge\npython_info 1\nvllm:num_requests_running 3\n" + exposition()
    assert reading(text.replace("\n", "\r\n")) == reading(exposition())


def test_a_metric_that_is_not_there_is_none_and_one_without_series_is_zero():
    found = reading(exposition(dense_fallbacks_total={}, preemptions_total=None))
    assert found.get("hfpaged_dense_fallbacks_total") == 0
    assert found.get("hfpaged_preemptions_total") is None
    for ask in (found.total, found.largest, found.histogram):
        with pytest.raises(Lacks, match=r"^hfpaged_preemptions_total$"):
            ask("hfpaged_preemptions_total")
    with pytest.raises(Lacks, match="hfpaged_preemptions_total"):
        found.by("hfpaged_preemptions_total", "cause")
    with pytest.raises(Lacks, match=r'hfpaged_engine_limit\{limit="nothing"\}'):
        found.largest("hfpaged_engine_limit", limit="nothing")


def test_a_number_that_is_none_counts_as_not_there():
    text = exposition(requests_waiting="NaN")
    assert reading(text).get("hfpaged_requests_waiting") == 0
    with pytest.raises(Lacks):
        reading(text).largest("hfpaged_requests_waiting")


def test_series_of_one_model_are_summed_and_those_of_others_left_out():
    text = exposition("a", requests_running=3) + exposition("b", requests_running=5)
    text += 'hfpaged_requests_running{model_name="a",replica="2"} 4\n'
    text += 'hfpaged_device_memory_bytes{device="cuda:1",kind="total"} 8\n'
    assert parse(text).model_names == ["a", "b"]
    assert reading(text, "a").total("hfpaged_requests_running") == 7
    assert reading(text, "b").total("hfpaged_requests_running") == 5
    for name in "ab":  # what belongs to no model belongs to all
        assert reading(text, name).total("hfpaged_device_memory_bytes", device="cuda:1") == 8
    with pytest.raises(MetricsError, match="no model is named 'c' in these metrics; there are 'a', 'b'"):
        reading(text, "c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no metric named hfpaged_...: have them exposed with hfpaged.telemetry.instrument()"),
        ("up 1\ngo_threads 3\n", "has 2 metrics, none of them named hfpaged_"),
        ("vllm:num_requests_running 1\n", "has metrics of vLLM, not of hfpaged"),
        ("sglang:num_running_reqs 1\n", "has metrics of SGLang, not of hfpaged"),
        ("tgi_request_count 1\n", "has metrics of text-generation-inference"),
        ("<html><body>404 page</body></html>\n", "is no metrics in Prometheus's text format"),
        ('hfpaged_kv_blocks{state="used" 3\n', "is no metrics in Prometheus's text format"),
        ("hfpaged_kv_blocks three\n", "is no metrics in Prometheus's text format"),
    ],
)
def test_what_is_not_ours_is_refused_with_a_remedy(text, words):
    with pytest.raises(MetricsError) as caught:
        parse(text, "the file")
    assert str(caught.value).startswith("the file ")
    assert words in str(caught.value)


def test_a_difference_counts_what_came_between_and_keeps_gauges():
    before = exposition(preemptions_total=5, requests_running=7, sequence_tokens=[(10, 4)])
    after = exposition(preemptions_total=8, requests_running=9, sequence_tokens=[(10, 4), (100, 2)])
    found = reading(after).since(reading(before), 60.0)
    assert found.total("hfpaged_preemptions_total") == 3
    assert found.total("hfpaged_requests_running") == 9
    lengths = found.histogram("hfpaged_sequence_tokens")
    assert (lengths.count, lengths.sum) == (2, 200)
    assert found.seconds == 60.0


def test_after_a_restart_the_difference_is_all_that_came_since():
    before = exposition(preemptions_total=50, sequence_tokens=[(10, 400)])
    after = exposition(preemptions_total=8, sequence_tokens=[(100, 2)])
    found = reading(after).since(reading(before), 60.0)
    assert found.total("hfpaged_preemptions_total") == 8
    assert found.histogram("hfpaged_sequence_tokens").count == 2


def test_quantiles_are_interpolated_as_prometheus_does():
    values = made_of([1, 2, 3, 4, 50], (2.0, 4.0, 8.0))
    assert values.mean == 12
    assert values.quantile(0.4) == 2.0
    assert values.quantile(0.5) == pytest.approx(2 + 2 * 0.5 / 2)
    assert values.quantile(1.0) == 8.0  # beyond the last bound nobody knows
    assert made_of([], (1.0,)).quantile(0.5) is None
    assert made_of([], (1.0,)).mean == 0


def simulated(lengths, size):
    """Fill blocks one by one."""
    slots = 0
    for length in lengths:
        blocks = 0
        while blocks * size < length:
            blocks += 1
        slots += blocks * size
    return 1 - sum(lengths) / slots


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), top=st.sampled_from([64, 256, 4096]), size=st.sampled_from([1, 4, *SIZES, 256]))
def test_the_waste_of_a_block_size_is_that_of_filling_blocks_one_by_one(seed, top, size):
    rng = random.Random(seed)
    lengths = [rng.randint(1, top) for _ in range(4000)]
    assert waste(made_of(lengths, LENGTH_BUCKETS), size) == pytest.approx(simulated(lengths, size), abs=0.02)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("typical", [20, 150, 900])
def test_it_is_near_for_lengths_as_requests_have_them(typical, size):
    rng = random.Random(typical)
    lengths = [1 + int(rng.lognormvariate(math.log(typical), 0.7)) for _ in range(4000)]
    assert waste(made_of(lengths, LENGTH_BUCKETS), size) == pytest.approx(simulated(lengths, size), abs=0.02)


@pytest.mark.parametrize("size", [1, 2, 8, 16, 24, 64, 1024])
def test_it_is_exact_where_each_length_of_a_bucket_comes_equally_often(size):
    lengths = [*range(1, 9), *range(17, 25), *range(65, 97), *range(129, 193)]
    assert waste(made_of(lengths, LENGTH_BUCKETS), size) == pytest.approx(simulated(lengths, size), abs=1e-12)


def test_sequences_beyond_the_last_bound_count_with_their_mean():
    rng = random.Random(0)
    lengths = [rng.randint(100, 300) for _ in range(2000)]
    assert waste(made_of(lengths, (8.0, 16.0)), 16) == pytest.approx(simulated(lengths, 16), abs=0.005)


def test_a_diagnosis_is_a_list_of_findings_that_people_can_read():
    diagnosis = diagnose(exposition(preempted_tokens_total=90_000, stalled_seconds=None))
    assert isinstance(diagnosis, list)
    assert isinstance(diagnosis, Diagnosis)
    assert [type(finding) for finding in diagnosis] == [Finding]
    text = str(diagnosis)
    assert text.startswith("tiny: 1 problem\n  requests: 1,000 requests ended since it began, 12 running, 0 waiting\n")
    assert "  prefixes: 60 % of prompt tokens found\n" in text
    assert "PROBLEM: Preemption thrash" in text
    assert "  because 5 preemptions took back 90,000 stored tokens" in text
    assert "  remedy  max_num_seqs 32 -> 16" in text
    assert text.endswith("not judged: no-progress (lacks hfpaged_stalled_seconds)")


def test_all_well_is_told_with_the_figures_that_show_it():
    assert str(diagnose(exposition(requests_running=0))) == (
        "tiny: all is well\n"
        "  requests: 1,000 requests ended since it began, 0 running, 0 waiting\n"
        "  pool: 80 % full while there is work, 80 % now\n"
        "  sequences: 750 tokens on average at their ends, 1.0 % of the slots in their blocks empty\n"
        "  prefixes: 60 % of prompt tokens found\n"
        "  first token: p50 375 ms, p95 488 ms\n"
        "  next tokens: p50 38 ms, p95 49 ms\n"
        "  output: 415 tokens/s of work"
    )


@pytest.mark.parametrize(
    ("lengths", "size", "told"),
    [
        ([(40, 1000)], "16", "40 tokens on average at their ends, 16 % of"),
        ([(40, 1000)], "64", "40 tokens on average at their ends, 37 % of"),
        ([(6000, 1000)], "16", "6,000 tokens on average at their ends, 0.1 % of"),
    ],
)
def test_short_and_long_sequences_are_told_with_what_their_last_blocks_waste(lengths, size, told):
    text = exposition(sequence_tokens=lengths, kv_pool_info={("auto", size, "1024", "1"): 1})
    assert f"sequences: {told} the slots in their blocks empty" in str(diagnose(text))


def test_without_sequences_nothing_is_said_of_their_blocks():
    diagnosis = diagnose(exposition(sequence_tokens=[]))
    assert "sequences:" not in str(diagnosis)
    assert not {"sequence_tokens_mean", "block_waste"} & set(diagnosis.figures)


def test_of_what_lies_beyond_the_last_bucket_no_more_is_said_than_is_known():
    text = exposition(time_to_first_token_seconds=[(0.3, 60), (77.0, 40)])
    assert "first token: p50 458 ms, p95 over 10 s" in str(diagnose(text))


def test_few_requests_are_said_to_be_too_few():
    text = exposition(requests_running=0, request_duration_seconds=[(10.0, 9)])
    assert diagnose(text).verdict == "nothing is found, but too few requests have ended to judge"


def test_a_note_is_no_finding_but_is_told():
    diagnosis = diagnose(exposition(requests_running=0, kv_byte_seconds_total=10**6))
    assert diagnosis == []
    assert [note.rule for note in diagnosis.notes] == ["few-requests"]
    assert diagnosis.verdict == "all is well"
    assert "NOTE: The pool is not full because there are few requests" in str(diagnosis)


def without_batchers(**figures):
    """What a process tells that only calls generate()."""
    names = (
        "requests", "request", "step", "wait", "computed", "generated", "engine", "last_step", "stalled", "preempt",
        "sequence",
    )  # fmt: skip
    none = {name: None for name in HEALTHY if name.removeprefix("hfpaged_").startswith(names)}
    calls = {"generate_calls_total": {"finished": 40}, "generate_tokens_total": {"prompt": 500, "output": 5000}}
    return exposition(changed=none | calls | figures)


def test_calls_of_generate_alone_are_judged_as_far_as_they_can_be():
    figures = {
        "generate_calls_total": {"finished": 40},
        "generate_tokens_total": {"prompt": 5000, "cached": 500, "output": 900},
        "prefix_queried_tokens_total": 5000, "prefix_hit_tokens_total": 500,
    }  # fmt: skip
    diagnosis = diagnose(without_batchers(**figures))
    assert [finding.rule for finding in diagnosis] == ["low-hit-rate"]
    assert "500 of 5,000 prompt tokens were found (10 %), and 83 % of all computed tokens" in diagnosis[0].evidence
    assert "40 calls of generate() ended since it began" in str(diagnosis)
    assert diagnosis.is_sure
    assert diagnosis.not_judged["pool-nearly-full"] == "hfpaged_step_sequences"
    assert "failing" not in diagnosis.not_judged
    assert str(diagnosis).splitlines()[-1] == (
        "not judged: 13 rules, as hfpaged_requests_running, hfpaged_requests_rejected_total, "
        "hfpaged_request_duration_seconds and 8 more metrics they need are not there"
    )


def test_families_are_as_good_as_text():
    families = list(text_string_to_metric_families(exposition()))
    assert list(diagnose(families)) == list(diagnose(exposition()))
    stuck = list(text_string_to_metric_families(exposition(stalled_seconds=100.0)))
    assert diagnose(stuck)[0].rule == "no-progress"


def test_of_several_models_one_must_be_named():
    text = exposition("a") + exposition("b", preempted_tokens_total=90_000)
    with pytest.raises(MetricsError, match=r"metrics of 2 models \(a, b\); name one with model_name="):
        diagnose(text)
    assert diagnose(text, "a") == []
    assert diagnose(text, model_name="b")[0].rule == "preemption-thrash"


@pytest.mark.parametrize("source", [None, 3, object()])
def test_what_has_no_metrics_is_refused(source):
    with pytest.raises(MetricsError, match="has no metrics; give a ContinuousBatcher"):
        diagnose(source)


def test_time_between_steps_does_not_make_a_pool_look_full():
    """Of an engine whose steps somebody makes now and then."""
    slow = exposition(
        request_duration_seconds=[(30.0, 1000)], kv_byte_seconds_total=3 * HEALTHY["hfpaged_kv_byte_seconds_total"]
    )
    assert derived.use(reading(slow)) == pytest.approx(0.8, rel=0.01)
    assert derived.mean_waiting(reading(slow), "blocks") == pytest.approx(50 / 1800, rel=0.01)


def test_between_two_readings_the_pool_is_as_full_as_it_is_now():
    now = {"used": 950, "cached": 74, "free": 0}
    found = reading(exposition(kv_blocks=now)).since(reading(exposition(kv_byte_seconds_total=0)), 10.0)
    assert derived.use(found) == pytest.approx(950 / 1024)


def test_figures_are_written_as_people_read_them():
    assert [percent(share) for share in (0, 0.004, 0.123, 1.0)] == ["0 %", "0.4 %", "12 %", "100 %"]
    assert [number(value) for value in (0, 4.25, 9.96, 1234567.8)] == ["0", "4.2", "10.0", "1,234,568"]
    assert [plural(value, "block") for value in (0, 1, 1.5, 2000)] == [
        "0 blocks",
        "1 block",
        "1.5 blocks",
        "2,000 blocks",
    ]
    assert [duration(s) for s in (0.0042, 0.25, 1.5, 75, 900, 7200)] == [
        "4.2 ms",
        "250 ms",
        "1.5 s",
        "75 s",
        "15 min",
        "2.0 h",
    ]
    assert [round_up(value) for value in (0.2, 1, 7.1, 9, 33, 100, 4097)] == [1, 1, 8, 10, 40, 112, 5120]
    assert [round_down(value) for value in (0.2, 1.9, 9, 33, 127)] == [1, 1, 8, 32, 112]


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 1e6))
def test_rounding_moves_a_number_by_a_quarter_at_most(value):
    assert value <= round_up(value) <= max(1.25 * value, value + 1)
    assert 0.75 * value - 1 < round_down(value) <= value


def test_a_quiet_minute_and_a_process_that_has_just_begun_have_no_finding():
    quiet = reading(exposition(requests_running=0)).since(reading(exposition(requests_running=0)), 60.0)
    fresh = {name: 0 if not isinstance(figure, list | dict) else type(figure)() for name, figure in HEALTHY.items()}
    for found in (quiet, reading(exposition(changed=fresh))):
        diagnosis = examine(found)
        assert (list(diagnosis), diagnosis.notes) == ([], [])
        assert diagnosis.verdict == "nothing is found, but too few requests have ended to judge"


AMOUNTS = st.sampled_from([0, 1, 3, 9, 10, 50, 1000, 10**6, 10**12])
LEAST = {"hfpaged_kv_bytes": st.sampled_from([10**6, 10**12]), "hfpaged_engine_limit": AMOUNTS.filter(bool)}
SMALL = st.sampled_from([0, 0.001, 0.5, 1, 7, 100, 5000, 10**6])


@st.composite
def any_figures(draw):
    """Of all metrics, however badly they go together."""
    figures = {}
    for name, healthy in HEALTHY.items():
        pairs = st.lists(st.tuples(SMALL, st.sampled_from([0, 1, 5, 1000])), max_size=3)
        amount = pairs if BY_NAME[name].kind == "histogram" else LEAST.get(name, AMOUNTS)
        if name.endswith("_info"):
            figures[name] = {
                (draw(st.sampled_from(["auto", "int8", "int4"])), draw(st.sampled_from("168")), "1", "1"): 1
            }
        elif isinstance(healthy, dict):
            figures[name] = {label: draw(amount) for label in healthy}
        else:
            figures[name] = draw(amount)
    return figures


@settings(max_examples=60, deadline=None)
@given(figures=any_figures(), seconds=st.sampled_from([None, 0.5, 60.0]))
def test_whatever_the_figures_are_they_are_judged_and_told_in_numbers(figures, seconds):
    found = reading(exposition(changed=figures))
    diagnosis = examine(found if seconds is None else found.since(reading(exposition()), seconds))
    told = str(diagnosis)
    assert not re.search(r"\b(nan|inf)\b|-> -|-\d+(\.\d+)? (%|[KMGT]?i?B|s|ms)\b", told), told
    assert "-> 0" not in told
    assert set(diagnosis.not_judged) <= {"pool-oversized"}


def test_it_asks_only_for_metrics_of_the_catalog():
    folder = Path(doctor.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    names = {name for name in re.findall(r'"(hfpaged_\w+)"', source) if name != PREFIX}
    assert len(names) > 30
    assert names <= set(BY_NAME)


def test_importing_the_doctor_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from hfpaged.doctor import diagnose, command\n"
        "diagnose('hfpaged_requests_running 1\\n# end\\n')\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


STRANGE = ("-3", "+Inf", "-Inf", "NaN", "1e300", "1e29", "1e-300", "0")
NO_SIZES = ("", "abc", "0", "-4", "1e9", "9" * 30)


@pytest.mark.parametrize("seed", range(40))
def test_figures_that_no_process_of_ours_tells_are_no_crash_and_their_json_is_json(seed):
    rng = random.Random(seed)
    lines = []
    pool = {("auto", rng.choice(NO_SIZES), "9", "1"): 1}
    for line in exposition(kv_pool_info=pool).splitlines():
        name, _, value = line.rpartition(" ")
        strange = not line.startswith("#") and rng.random() < 0.2
        lines.append(f"{name} {rng.choice(STRANGE)}" if strange else f"{name} {value}")
        if 'le="' in name and rng.random() < 0.01:
            lines.append(name.replace('le="', 'le="no') + " 1")
    diagnosis = diagnose("\n".join(line for line in lines if line.strip()) + "\n")
    assert str(diagnosis)
    json.dumps(as_json("here", None, [diagnosis], 0), allow_nan=False)
    assert "block-size" in diagnosis.not_judged


def test_failed_calls_of_generate_are_not_told_of_what_batchers_have():
    (finding,) = diagnose(without_batchers(generate_calls_total={"finished": 40, "error": 3}))
    assert (finding.rule, finding.severity) == ("failing", "problem")
    assert "see what 3 calls of generate() raised" in finding.remedy
    assert not re.search(r"output\.error|max_num", finding.remedy)
    (both,) = diagnose(exposition(generate_calls_total={"error": 3}, requests_finished_total={"error": 30}))
    assert "output.error" in both.remedy
    assert "generate() raised" in both.remedy


@pytest.mark.parametrize("calls", [0, 40])
def test_memory_is_judged_without_a_batcher(calls):
    full = {("cuda:0", "peak"): 22.8 * 2**30, ("cuda:0", "allocated"): 20.5 * 2**30, ("cuda:0", "reserved"): 21 * 2**30,
            ("cuda:0", "free"): 2.5 * 2**30}  # fmt: skip
    found = diagnose(without_batchers(generate_calls_total={"finished": calls}, device_memory_bytes=full))
    assert found[0].rule == "memory-at-peak"
    assert "a smaller batch or shorter prompts in a call of generate()" in found[0].remedy
    heavy = diagnose(
        without_batchers(generate_calls_total={"finished": calls}, model_weights_bytes={"cuda:0": 21 * 2**30})
    )
    assert [finding.rule for finding in heavy] == ([] if calls else ["weights-and-pool"])


def test_what_remedies_name_is_there():
    import hfpaged

    words = " ".join(path.read_text() for path in Path(rules.__file__).parent.glob("*.py"))
    owners = {
        "pool": hfpaged.KVPool, "cache": hfpaged.PagedCache, "batcher": hfpaged.ContinuousBatcher,
    }  # fmt: skip
    named = re.findall(r"\b(pool|cache|batcher)\.([a-z_]+)\b(?!\.py)", words.replace("doctor.rules.pool", ""))
    assert ("cache", "explain_last") in named
    assert not [(owner, name) for owner, name in named if not hasattr(owners[owner], name) and name != "import"]
