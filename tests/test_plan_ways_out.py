"""The ways out: each makes it fit when it is planned again, and they come with the cheapest first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import GB, GIB, case, llama

from hfpaged.planner.cards import CARDS
from hfpaged.planner.fit import fit
from hfpaged.planner.model_facts import LayerKV
from hfpaged.planner.sizes import Sizes
from hfpaged.planner.ways_out import ways_out

# Eight GB of pool too few for what is asked, on a card of 24 GiB.
TIGHT = {"memory": 24 * GIB, "concurrency": 16}


def kinds(found):
    return [tuple(change.kind for change in way.changes) for way in ways_out(found)]


def way(found, *kinds):
    return next(way for way in ways_out(found) if way.kinds == set(kinds))


def test_what_fits_needs_none():
    assert ways_out(fit(case(concurrency=1))) == []


@pytest.mark.parametrize(
    "asked",
    [
        case(**TIGHT),
        case(llama(kv_heads=8), memory=24 * GIB, concurrency=100, activations=GB),
        case(memory=24 * GIB, weights=30 * GB),
        case(llama(dtype="float32"), memory=24 * GIB, concurrency=8),
        case(llama(layers=(LayerKV("sliding", 32, 128, 128, window=512), *llama().layers)), **TIGHT),
        case(memory=16 * GIB, is_cpu=True, utilization=0.5),
        case(pool=GIB, concurrency=4),
    ],
    ids=["tight", "grouped", "weights", "float32", "sliding", "cpu", "pool"],
)
def test_each_makes_it_fit_and_the_cheapest_comes_first(asked):
    found = fit(asked)
    assert not found.fits
    ways = ways_out(found)
    assert ways
    assert all(fit(way.fit.case).fits for way in ways)
    assert [way.price for way in ways] == sorted(way.price for way in ways)
    assert all(way.costs and way.price > 0 for way in ways)


def test_all_that_the_issue_asks_for_are_among_them():
    found = {kind for kinds_of in kinds(fit(case(**TIGHT))) for kind in kinds_of}
    assert {"requests", "context", "kv", "window", "card", "tp"} <= found


def test_fewer_requests_are_as_many_as_fit():
    found = fit(case(**TIGHT))
    fewer = way(found, "requests").fit.case
    assert fewer.workload.concurrency == found.sequences
    assert not fit(replace(fewer, workload=replace(fewer.workload, concurrency=found.sequences + 1))).fits


def test_shorter_requests_keep_the_share_of_their_prompts_and_lower_the_context():
    shorter = way(fit(case(**TIGHT)), "context").fit.case.workload
    assert shorter.prompt == pytest.approx(shorter.tokens / 3, abs=1)
    assert shorter.context == shorter.tokens


def test_where_one_long_request_is_the_trouble_only_the_context_is_lowered():
    shorter = way(fit(case(pool=GIB, context=8192)), "context").fit.case.workload
    assert (shorter.tokens, shorter.context) == (1536, 2048)


def test_the_other_card_is_the_smallest_that_is_enough():
    found = way(fit(case(**TIGHT | {"concurrency": 24})), "card").fit
    chosen = next(card for card in CARDS if card.name == found.case.machine.name)
    smaller = [card for card in CARDS if 24 * GIB < card.memory < chosen.memory]
    assert smaller
    for card in smaller:
        assert not fit(replace(found.case, machine=replace(found.case.machine, memory=card.memory))).fits


def test_two_that_do_not_help_alone_may_help_together():
    found = fit(case(memory=24 * GIB, weights=21 * GB, prompt=8192, output=0))
    pair = way(found, "utilization", "kv")
    assert not {("utilization",), ("kv",)} & set(kinds(found))
    assert pair.title.count(", and ") == 1


def test_weights_that_no_card_holds_go_onto_several():
    ways = ways_out(fit(case(memory=24 * GIB, weights=810 * GB)))
    assert [way.changes[0].kind for way in ways] == ["cards"]
    assert ways[0].fit.case.choices.tp > 1


def test_a_pair_is_cheaper_than_each_of_its_two_kinds_alone():
    for asked in (case(**TIGHT), case(llama(dtype="float32"), memory=24 * GIB, concurrency=8)):
        found = ways_out(fit(asked))
        alone = [way for way in found if len(way.changes) == 1]
        pairs = [way for way in found if len(way.changes) == 2]
        assert all(pair.price < way.price for pair in pairs for way in alone if way.kinds <= pair.kinds)


def test_where_nothing_else_helps_two_changes_may_be_of_weights_and_cards():
    layer = LayerKV("full", 8, 128, 128)
    facts = llama(
        dtype="float32", layers=(layer,) * 150, attention_heads=128, hidden_size=16384, intermediate_size=65536
    )  # fmt: skip
    asked = case(facts, memory=24 * GIB, concurrency=1)
    asked = replace(asked, sizes=Sizes(facts, None, 0))
    found = ways_out(fit(asked))
    assert found
    assert all("cards" in way.kinds and len(way.changes) == 2 for way in found)


def test_what_nothing_helps_has_no_way_out():
    assert ways_out(fit(case(memory=24 * GIB, weights=10**14))) == []


def test_states_cannot_be_cut_by_a_window_and_formats_that_heads_refuse_are_left_out():
    state = llama(layers=(*llama().layers, LayerKV("state", state_bytes=100)))
    assert ("window",) not in kinds(fit(case(state, **TIGHT)))
    odd = llama(layers=(LayerKV("full", 32, 127, 127),) * 32)
    for found in ways_out(fit(case(odd, **TIGHT))):
        assert found.fit.case.choices.kv_format != "int4"


def test_what_others_hold_of_a_card_is_told_where_it_would_be_enough():
    crowded = fit(case(memory=24 * GIB, in_use=4 * GB, concurrency=8))
    assert way(crowded, "others").fit.case.machine.in_use == 0
    assert "the 4 GB that they hold" in way(crowded, "others").costs
    assert ("others",) not in kinds(fit(case(memory=40 * GIB, in_use=4 * GB, concurrency=64, is_cpu=True)))


def test_a_cpu_is_not_filled_to_the_brim_and_gets_no_ranks():
    found = kinds(fit(case(memory=40 * GIB, is_cpu=True, utilization=0.5, concurrency=64)))
    assert found
    assert not {"utilization", "tp"} & {kind for kinds_of in found for kind in kinds_of}
