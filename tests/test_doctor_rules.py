"""Each rule of the doctor: figures that trigger it, what it says of them, and figures close by that do not."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from exposition import GIB, HEALTHY, exposition

from hfpaged.doctor.examination import examine
from hfpaged.doctor.exposition import parse
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.rules import RULES
from hfpaged.doctor.rules.rule import judge, name_of


class Case(NamedTuple):
    """Figures other than the healthy ones, and words of the finding; without any words the rule has to be silent."""

    figures: dict
    words: tuple[str, ...] = ()
    severity: str = "problem"


def memory(**gib):
    return {"device_memory_bytes": {("cuda:0", kind): size and size * GIB for kind, size in gib.items()}}


def lookups(**counts):
    return {"prefix_lookups_total": {"complete": 0, "differs": 0, "evicted": 0, "never_seen": 0, **counts}}


def missed(hits=50_000, **counts):
    """Of 500,000 prompt tokens."""
    return {"prefix_hit_tokens_total": hits, **lookups(**counts)}


# The same requests, but in all they waited for so many seconds more.
def waited(seconds, cause, held=0.8):
    before = HEALTHY["hfpaged_wait_seconds_total"].get(cause, 0)
    return {
        "wait_seconds_total": {cause: seconds},
        "request_duration_seconds": [(10.0 + (seconds - before) / 1000, 1000)],
        "kv_byte_seconds_total": held * 2 * GIB * 600,
    }


# What shadow decoding found in 200 requests.
def shadowed(kv_format, tokens, top1, kl, **more):
    return {
        "shadow_requests_total": {kv_format: 200},
        "shadow_tokens_total": {kv_format: tokens},
        "shadow_top1_agreed_tokens_total": {kv_format: round(top1 * tokens)},
        "shadow_kl": {kv_format: [(kl, tokens)]},
        **more,
    }


HALF_EMPTY = {"kv_byte_seconds_total": 0.4 * 2 * GIB * 600, "kv_blocks": {"used": 410, "cached": 105, "free": 509}}
NEVER_STEPPED = {"step_duration_seconds": {"prefill": [], "decode": []}}
PREFILLS = {
    "step_duration_seconds": {"prefill": [(0.1, 4500)], "decode": [(0.015, 10_000)]},
    "computed_tokens_total": {"prefill": 1_000_000, "decode": 250_000},
}

TRIGGERS = {
    "no-progress": [
        Case(
            {"stalled_seconds": 98, "step_duration_seconds": {"prefill": [(4.0, 3000)]}},
            ("98 s an", "took at most 4.9 s"),
        ),
        Case({"stalled_seconds": 30}, ("12 requests running and 0 requests waiting", "30 s an")),
        Case(
            {"stalled_seconds": 7300, "requests_running": 0, "requests_waiting": 1},
            ("1 request waiting", "2.0 h an"),
        ),
    ],
    "memory-at-peak": [
        Case(
            memory(peak=22.4),
            ("22.4 GiB allocated", "6.4 GiB of them", "others hold 512.0 MiB", "95 % of 24.0 GiB", "free 1.3 GiB",
             "max_num_batched_tokens 4096 -> 3072", "a pool of 2.0 GiB -> 716.8 MiB"),
        ),
        Case(memory(peak=23.0, allocated=22.0), ("free 1.4 GiB: a pool of 2.0 GiB -> 614.4 MiB (memory=)",)),
        Case(memory(peak=22.8, allocated=20.5, reserved=21, free=2.5), ("max_num_batched_tokens 4096 -> 1024",)),
        Case(memory(peak=22.8, allocated=20.57, reserved=21, free=2.5), ("free 1.7 GiB: a pool of 2.0 GiB",)),
        Case(
            {"device_memory_bytes": {("cpu", "total"): 10 * GIB, ("cpu", "free"): 0.5 * GIB, ("cpu", "peak"): GIB}},
            ("512.0 MiB of 10.0 GiB are free on cpu",),
        ),
        Case(memory(peak=None, free=1.1), ("1.1 GiB of 24.0 GiB are free on cuda:0", "free 1.3 GiB")),
    ],
    "weights-and-pool": [
        Case(
            {**memory(peak=None), "model_weights_bytes": {"cuda:0": 19.7 * GIB}},
            ("weights of 19.7 GiB and a pool of 2.0 GiB are 90 % of 24.0 GiB", "2.0 GiB -> 716.8 MiB", "memory=0.85"),
        ),
        Case({**NEVER_STEPPED, "model_weights_bytes": {"cuda:0": 22 * GIB}}, ("100 %", "a larger device")),
    ],
    "failing": [
        Case({"requests_finished_total": {"error": 11}}, ("11 requests of 1,012", "1 %")),
        Case({"requests_finished_total": {"error": 10}, "requests_received_total": 1000}, ("10 requests of 1,000",)),
        Case({"requests_finished_total": {"error": 9}, "requests_received_total": 960}, ("0.9 %",), "advice"),
        Case({"requests_finished_total": {"error": 1}}, ("1 request of 1,012", "0.1 %"), "advice"),
        Case({"generate_calls_total": {"finished": 80, "error": 20}}, ("20 requests of 1,112", "2 %")),
    ],
    "rejected": [
        Case(
            {"requests_rejected_total": {"too_long": 40, "invalid": 11}},
            ("51 of 1,012 requests", "5 %", "40 x too_long, 11 x invalid",
             "max_model_len from 8192"),
        ),
        Case({"requests_rejected_total": {"invalid": 1}, "requests_received_total": 10}, ("10 %",)),
        Case({"requests_rejected_total": {"invalid": 200}}, ("correct what the clients send",)),
        Case({"requests_rejected_total": {"closed": 200}}, ("after close()",)),
        Case({"requests_rejected_total": {"queue_full": 200}}, ("max_num_queued_requests", "replica")),
    ],
    "pool-full": [
        Case(
            waited(4000, "blocks"),
            ("29 % of their time waiting for blocks", "6.7 of them on average beside 16 sequences", "5 preemptions in "
             "1,000 requests", "2.0 GiB is 80 % full", "a pool of 2.0 GiB -> 2.8 GiB", "1 more replica",
             "kv_dtype='int8' ('auto' now) at least halves"),
        ),
        Case(waited(2600, "blocks"), ("21 % of their time",)),
        Case(waited(10**6, "blocks") | {"engine_limit": {"max_num_seqs": 999}}, ("-> 16.0 GiB", "7 more replicas")),
        Case({"request_duration_seconds": [(10.0, 10)], "preemptions_total": 1}, ("1 preemption in 10 requests",)),
        Case({"preemptions_total": 100}, ("100 preemptions in 1,000 requests", "max_num_seqs 32 -> 16")),
        Case(
            {"kv_blocks": {"used": 1020, "cached": 4, "free": 0}, "requests_waiting": 3, "preemptions_total": 0,
             "kv_pool_info": {("int8", "16", "1024", "1"): 1}},
            ("100 % now", "kv_dtype='int4' ('int8' now)"),
        ),
    ],
    "preemption-thrash": [
        Case(
            {"preempted_tokens_total": 45_000, "preemptions_total": 60, "requests_preempted": 2},
            ("60 preemptions took back 45,000 stored tokens", "10 % of the 450,000", "2 requests wait now",
             "max_num_seqs 32 -> 16", "watermark=0.05"),
        ),
    ],
    "seats-taken": [
        Case(
            {**waited(4000, "seats", held=0.4), "engine_limit": {"max_num_seqs": 16}},
            ("29 % of their time", "max_num_seqs=16 seats", "6.7 of them", "40 % full", "33 such sequences",
             "max_num_seqs 16 -> 24"),
        ),
        Case(
            {**waited(12_000, "seats", held=0.6), "engine_limit": {"max_num_seqs": 16, "max_num_batched_tokens": 18}},
            ("max_num_seqs 16 -> 20, and max_num_batched_tokens 18 -> 20",),
        ),
    ],
    "budget-small": [
        Case(
            {**waited(4000, "budget"), "engine_limit": {"max_num_batched_tokens": 100}},
            ("29 % of their time", "6.7 of them", "82 tokens of max_num_batched_tokens=100", "80 % full",
             "max_num_batched_tokens 100 -> 3584"),
        ),
        Case(waited(40_000, "budget") | {"engine_limit": {"max_num_batched_tokens": 164}}, ("164 -> 8192",)),
        Case(waited(4000, "budget") | {"engine_limit": {"max_num_batched_tokens": 166}}, ("max_step",), "advice"),
        Case(
            waited(4000, "budget"), ("82 tokens of max_num_batched_tokens=4096", "max_step_stretch=4"), "advice"
        ),
    ],
    "low-hit-rate": [
        Case(
            missed(differs=600, never_seen=400),
            ("50,000 of 500,000 prompt tokens were found (10 %)", "44 % of all computed tokens", "600 of 1,000 lookups",
             "50 of 500 tokens in", "prompts differ early", "behind what they share"),
        ),
        Case(
            missed(evicted=600, never_seen=400),
            ("at an evicted block", "2.0 GiB -> 2.1 GiB", "come back from there (swap_space=, --swap-space)"),
        ),
        Case(
            missed(evicted=600, never_seen=400) | {"kv_swap_space_blocks": None},  # as it is where there is none
            ("at an evicted block", "come back from there (swap_space=, --swap-space)"),
        ),
        Case(missed(evicted=600) | {"kv_evicted_blocks_total": 9999}, ("pin what many share",)),
        Case(missed(149_000, differs=10), ("10 of 10 lookups",)),
        Case(missed(0, differs=10) | {"prefix_queried_tokens_total": 500}, ("0 of 500 prompt tokens",)),
        Case(missed(differs=10) | {"computed_tokens_total": {"prefill": 110_000}}, ("31 % of all computed",)),
        Case(missed(below_block_size=600, differs=400), ("block_size=16 -> 8",)),
        Case(
            missed(below_block_size=600) | {"kv_pool_info": {("auto", "8", "1024", "1"): 1}},
            ("with blocks of 8 tokens there is little to gain",),
        ),
        Case(missed(other_key=600, differs=400), ("another salt, adapter or model",), "advice"),
        Case(missed(0, never_seen=1000), ("none before", "put that last"), "advice"),
        Case(missed(left_window=600, differs=400), ("windows", "pin_prefix"), "advice"),
        Case(missed(declined=600, differs=400), ("none is looked up", "cache.explain_last() says why"), "advice"),
        Case(missed(brand_new=600, differs=400), ("ended by brand_new",), "advice"),
        Case(missed(**{"below block size": 600}), ("block_size=16 -> 8",)),  # as reports write it
    ],
    "evicted-prefixes": [
        Case(
            {**lookups(complete=500, differs=400, evicted=100), "kv_evicted_blocks_total": 512},
            ("100 of 1,000 lookups (10 %)", "512 blocks had to make room in a pool of 1,024", "hit rate is 60 %",
             "a pool of 2.0 GiB -> 3.0 GiB"),
        ),
        Case({**lookups(complete=9, evicted=1), "kv_evicted_blocks_total": 3060}, ("2.0 GiB -> 8.0 GiB",)),
        Case({**lookups(complete=500, evicted=500), "kv_evicted_blocks_total": 3090}, ("kv_dtype='int8' keeps twice",)),
        Case(
            {**lookups(complete=500, evicted=500), "kv_evicted_blocks_total": 4000},
            ("pin what many share", "kv_dtype='int8' keeps twice"),
        ),
    ],
    "kv-format-costs": [
        Case(
            shadowed("int4", 12_000, 0.92, 0.01),
            ("int4 costs: top-1 92.0 % (at least 93 %), KL 0.01 (at most 0.02) over 12,000 tokens of 200 requests of",
             "quality MODEL --kv int4 --against"),
        ),
        Case(
            shadowed("int8, layer 0 auto", 1000, 0.99, 0.03, shadow_dropped_total={("int8, layer 0 auto", "beams"): 1}),
            ("KL 0.03", "; 1 request drawn besides", "--kv int8 --against"),
        ),
    ],
    "dense-fallbacks": [
        Case(
            {"dense_fallbacks_total": {"output_attentions": 15_000, "gradients": 5_000}},
            ("20,000 attention calls", "in 15,000 steps", "75 % of them for: output attentions"),
        ),
        Case({"dense_fallbacks_total": {"mask": 1}}, ("1 attention call",), "advice"),
    ],
    "long-queue": [
        Case(
            {"request_queue_seconds": [(0.5, 880), (1.0, 120)], "request_duration_seconds": [(1.8, 1000)],
             "wait_seconds_total": {"prefix": 500}},
            ("longer than 1.0 s", "for prefix", "pool.pin_prefix"),
        ),
        Case(
            {"request_queue_seconds": [(4.0, 1000)], "requests_waiting": 7, "wait_seconds_total": {"turn": 4000},
             "request_duration_seconds": [(13.3, 1000)]},
            ("longer than 5.0 s", "30 % of their time", "7 wait now", "for turn (98 % of it, 30 % of",
             "steps are long"),
        ),
    ],
    "scheduling-bound": [
        Case(
            {"step_seconds_total": {"forward": 0.1, "sampling": 0.1, "scheduling": 0.8},
             "step_duration_seconds": {"prefill": [(0.05, 10)], "decode": [(0.05, 10)]}},
            ("scheduling 80 %",),
            "advice",
        ),
        Case(
            {"step_seconds_total": {"forward": 330, "sampling": 30, "scheduling": 240}},
            ("of 40.0 ms of a step", "the forward takes 55 %", "sampler 5 % and scheduling 40 %", "16 sequences"),
            "advice",
        ),
    ],
    "prefill-bound": [
        Case(
            {**waited(4000, "turn", held=0.4), **PREFILLS},
            ("take 75 % of the time", "80 % of all tokens", "40 % full", "60 % of prompt tokens", "wait 29 %"),
            "advice",
        ),
    ],
    "aborted": [
        Case({"requests_aborted_total": 200}, ("200 of 1,000 requests were aborted (20 %)", "than 488 ms"), "advice"),
    ],
    "block-size": [
        Case(
            {"sequence_tokens": [(40, 1000)]},
            ("1,000 sequences of 40 tokens", "16 % of the slots", "8 % with 8, 16 % with 16, 37 % with 32",
             "37 % with 64", "2 % of used blocks now", "block_size=16 -> 8"),
            "advice",
        ),
        Case({"sequence_tokens": [(60, 560), (90, 440)]}, ("10 % with 16", "block_size=16 -> 8"), "advice"),
        Case(
            {"sequence_tokens": [(150, 800), (90, 200)], "kv_pool_info": {("auto", "64", "256", "1"): 1}},
            ("2 % with 8, 5 % with 16, 10 % with 32, 19 % with 64", "block_size=64 -> 16"),
            "advice",
        ),
        Case(
            {"sequence_tokens": [(150, 700), (90, 300)], "kv_pool_info": {("auto", "64", "256", "1"): 1}},
            ("5 % with 16", "block_size=64 -> 8"),
            "advice",
        ),
        Case(
            {"sequence_tokens": [(750, 1000)], "kv_pool_info": {("auto", "256", "64", "1"): 1},
             "kv_byte_seconds_total": 0.95 * 2 * GIB * 600},
            ("14 % with 256", "block_size=256 -> 64"),
        ),
    ],
    "pool-nearly-full": [
        Case(
            {"kv_byte_seconds_total": 0.92 * 2 * GIB * 600},
            ("92 % full", "more than 90 %", "2.0 GiB -> 2.3 GiB"),
            "advice",
        ),
    ],
    "pool-oversized": [
        Case(
            {"kv_blocks": {"used": 100, "cached": 200, "free": 724}, "kv_evicted_blocks_total": 0,
             "request_duration_seconds": [(10.0, 100)]},
            ("in 100 requests",),
            "advice",
        ),
        Case(
            {"kv_blocks": {"used": 102, "cached": 205, "free": 717}, "kv_evicted_blocks_total": 0},
            ("in 1,000 requests", "307 of 1,024 blocks (30 %)", "2.0 GiB -> 767.5 MiB"),
            "advice",
        ),
    ],
    "few-requests": [
        Case({"kv_byte_seconds_total": 0.69 * 2 * GIB * 600}, ("69 % full",), "note"),
        Case(HALF_EMPTY, ("40 % full", "16 sequences", "at most 32", "1 % of their time", "415 tokens/s"), "note"),
    ],
}  # fmt: skip

SILENT = {
    "no-progress": [
        {"stalled_seconds": 29.9},
        {"stalled_seconds": 9999, "requests_running": 0},
        {"stalled_seconds": 97, "step_duration_seconds": {"prefill": [(4.0, 3000)]}},
    ],
    "memory-at-peak": [
        memory(peak=22.2),
        memory(peak=None, free=1.3),
        {"device_memory_bytes": {("cuda:0", "total"): 0}},
        # Of a process that needed it all while it loaded its model.
        {"device_memory_bytes": {("cpu", "total"): 10 * GIB, ("cpu", "free"): 6 * GIB, ("cpu", "peak"): 10 * GIB}},
    ],
    "weights-and-pool": [
        {**memory(peak=None), "model_weights_bytes": {"cuda:0": 19.5 * GIB}},
        {"model_weights_bytes": {"cuda:0": 21 * GIB}},  # steps were made, so their peak is the judge
    ],
    "failing": [{"requests_finished_total": {"error": 0}}],
    "rejected": [
        {"requests_rejected_total": {"too_long": 50}},
        {"requests_rejected_total": {"too_long": 5}, "requests_received_total": 9},
    ],
    "pool-full": [
        waited(2400, "blocks"),  # 19 % of the time
        {"wait_seconds_total": {"blocks": 4000, "seats": 4001}, "request_duration_seconds": [(18.0, 1000)]},
        {"preemptions_total": 99},
        {"kv_blocks": {"used": 972, "cached": 52, "free": 0}, "requests_waiting": 3},
        {"kv_blocks": {"used": 1020, "cached": 4, "free": 0}},
        {"request_duration_seconds": [(10.0, 9)], "preemptions_total": 9},
    ],
    "preemption-thrash": [{"preempted_tokens_total": 44_900}, {"computed_tokens_total": {"prefill": 0, "decode": 0}}],
    "seats-taken": [
        {**waited(2400, "seats", held=0.4), "engine_limit": {"max_num_seqs": 16}},
        {**waited(4000, "seats", held=0.71), "engine_limit": {"max_num_seqs": 16}},
        {**waited(4000, "seats", held=0.4), "engine_limit": {"max_num_seqs": 33}},  # more of that size do not fit
    ],
    "budget-small": [waited(2400, "budget"), waited(4000, "turn")],
    "low-hit-rate": [
        missed(150_000, differs=600, never_seen=400),
        missed(differs=9),
        missed(complete=1000),
        missed(differs=1000) | {"prefix_queried_tokens_total": 499, "prefix_hit_tokens_total": 0},
        missed(differs=1000) | {"computed_tokens_total": {"prefill": 100_000, "decode": 250_000}},
    ],
    "evicted-prefixes": [
        lookups(complete=500, differs=401, evicted=99),
        lookups(differs=4, evicted=5),
        missed(evicted=600, differs=400),  # low-hit-rate says it
    ],
    "kv-format-costs": [
        shadowed("int8", 12_000, 0.93, 0.02),
        shadowed("int8", 999, 0.5, 2.5),
        {"shadow_tokens_total": {"int8": 0}},
        {"shadow_tokens_total": None},
    ],
    "dense-fallbacks": [{"dense_fallbacks_total": {"mask": 0}}, {"dense_fallbacks_total": None}],
    "long-queue": [
        {"request_queue_seconds": [(4.0, 1000)], "request_duration_seconds": [(13.4, 1000)]},
        {"request_queue_seconds": [(0.5, 890), (1.0, 110)], "request_duration_seconds": [(1.8, 1000)]},
        {"request_queue_seconds": [(4.0, 9)], "request_duration_seconds": [(4.0, 9)]},
    ],
    "scheduling-bound": [
        {"step_seconds_total": {"forward": 331, "sampling": 30, "scheduling": 239}},
        {"step_seconds_total": {"forward": 0.1, "sampling": 0.1, "scheduling": 0.4},
         "step_duration_seconds": {"prefill": [(0.05, 9)], "decode": [(0.05, 10)]}},
    ],
    "prefill-bound": [
        {**waited(2300, "turn", held=0.4), **PREFILLS},
        {**waited(4000, "turn", held=0.71), **PREFILLS},
        {**waited(4000, "turn", held=0.4), **PREFILLS, "computed_tokens_total": {"prefill": 9e5}},
        {**waited(4000, "turn", held=0.4), **PREFILLS,
         "step_duration_seconds": {"prefill": [(0.09, 4600)], "decode": [(0.0186, 10_000)]}},
    ],
    "aborted": [{"requests_aborted_total": 199}, {"requests_aborted_total": 9, "request_duration_seconds": [(1, 9)]}],
    "block-size": [
        {"sequence_tokens": [(60, 480), (90, 520)]},  # 9.8 %
        {"sequence_tokens": [(20, 1000)], "kv_pool_info": {("auto", "8", "2048", "1"): 1}},  # none is smaller
        {"sequence_tokens": []},
        {"sequence_tokens": [(40, 1000)], "request_duration_seconds": [(10.0, 9)]},
    ],
    "pool-nearly-full": [
        {"kv_byte_seconds_total": 0.9 * 2 * GIB * 600},
        waited(4000, "blocks", held=0.95),
        {"kv_byte_seconds_total": 0.92 * 2 * GIB * 600, "preemptions_total": 100},
        {"request_duration_seconds": [(10.0, 9)], "kv_byte_seconds_total": 0.92 * 2 * GIB * 600},
    ],
    "pool-oversized": [
        {"kv_blocks": {"used": 103, "cached": 205, "free": 716}, "kv_evicted_blocks_total": 0},
        {"kv_blocks": {"used": 100, "cached": 200, "free": 724}, "kv_evicted_blocks_total": 1},
        {"kv_blocks": {"used": 100, "cached": 0, "free": 924}, "kv_evicted_blocks_total": 0},
        {"kv_blocks": {"used": 100, "cached": 200, "free": 724}, "kv_evicted_blocks_total": 0,
         "request_duration_seconds": [(10.0, 99)]},
    ],
    "few-requests": [
        {"kv_byte_seconds_total": 0.71 * 2 * GIB * 600},
        waited(4000, "turn", held=0.4),
        {**HALF_EMPTY, "request_duration_seconds": [(10.0, 9)]},
    ],
}  # fmt: skip

BY_NAME = {name_of(rule): rule for rule in RULES}


def found(rule, figures):
    return judge(BY_NAME[rule], Reading.of(parse(exposition(changed=figures)), "tiny"))


def cases(table):
    return [pytest.param(rule, case, id=f"{rule}-{i}") for rule, all_ in table.items() for i, case in enumerate(all_)]


def test_each_rule_has_cases_that_trigger_it_and_others_close_by_that_do_not():
    assert set(TRIGGERS) == set(SILENT) == set(BY_NAME)
    assert all(TRIGGERS.values())
    assert all(SILENT.values())
    assert len(BY_NAME) == len(RULES)


@pytest.mark.parametrize(("rule", "case"), cases(TRIGGERS))
def test_a_rule_is_triggered_and_says_the_figures(rule, case):
    finding = found(rule, case.figures)
    assert finding is not None
    assert (finding.rule, finding.severity) == (rule, case.severity)
    assert not [word for word in case.words if word not in str(finding)], str(finding)
    assert all((finding.title, finding.evidence, finding.remedy))


@pytest.mark.parametrize(("rule", "figures"), cases(SILENT))
def test_a_rule_is_silent_close_by(rule, figures):
    assert found(rule, figures) is None


def test_a_healthy_engine_has_no_finding_and_no_note_and_all_rules_are_judged():
    diagnosis = examine(Reading.of(parse(exposition()), "tiny"))
    assert (list(diagnosis), diagnosis.notes, diagnosis.not_judged) == ([], [], {})
    assert diagnosis.verdict == "all is well"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_rule_that_lacks_a_metric_is_silent_and_listed_with_it(name):
    diagnosis = examine(Reading.of(parse(exposition(changed={name: None})), "tiny"))
    assert (list(diagnosis), diagnosis.notes) == ([], [])
    assert all(name in lacking for lacking in diagnosis.not_judged.values())


def test_without_figures_no_rule_is_judged_but_that_of_a_metric_which_begins_with_what_is_bad():
    everything = {name: None for name in HEALTHY if name != "hfpaged_generate_running"}
    diagnosis = examine(Reading.of(parse(exposition(changed=everything)), "tiny"))
    assert set(diagnosis.not_judged) == set(BY_NAME) - {"dense-fallbacks", "kv-format-costs"}
    assert not diagnosis


def test_what_stops_all_requests_comes_before_what_makes_them_wait_and_that_before_advice():
    bad = {
        **waited(4000, "blocks"),
        **missed(0, never_seen=1000),
        **memory(peak=23),
        "stalled_seconds": 60,
        "preempted_tokens_total": 90_000,
        "requests_aborted_total": 300,
        "sequence_tokens": [(40, 1000)],
        "request_queue_seconds": [(8.0, 1000)],
    }
    diagnosis = examine(Reading.of(parse(exposition(changed=bad)), "tiny"))
    assert [finding.rule for finding in diagnosis] == [
        "no-progress", "memory-at-peak", "pool-full", "preemption-thrash", "long-queue",
        "low-hit-rate", "aborted", "block-size",
    ]  # fmt: skip
    assert diagnosis.verdict == "5 problems, 3 pieces of advice"


def test_a_problem_comes_before_advice_of_a_rule_that_is_more_important():
    bad = {"requests_finished_total": {"error": 1}, "preempted_tokens_total": 90_000}
    diagnosis = examine(Reading.of(parse(exposition(changed=bad)), "tiny"))
    assert [finding.rule for finding in diagnosis] == ["preemption-thrash", "failing"]


@pytest.mark.parametrize("figures", [case.figures for all_ in TRIGGERS.values() for case in all_])
def test_all_rules_can_be_judged_together(figures):
    diagnosis = examine(Reading.of(parse(exposition(changed=figures)), "tiny"))
    assert [*diagnosis, *diagnosis.notes]
    assert diagnosis.figures["requests_ended"] >= 0
