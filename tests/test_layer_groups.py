from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpaged.layer_groups import LayerGroup, group_layers


def windows_of(text):
    """ "f" is a full layer, a digit d a sliding one with window 100 * d, "-" a layer that is not paged."""
    return {i: None if c == "f" else 100 * int(c) for i, c in enumerate(text) if c != "-"}


def sizes(groups):
    return [(group.window, len(group.layers)) for group in groups]


def test_layers_of_one_kind_are_one_group():
    assert group_layers(windows_of("ffff")) == (LayerGroup(None, (0, 1, 2, 3)),)
    assert group_layers(windows_of("555")) == (LayerGroup(500, (0, 1, 2)),)


def test_no_layers_are_no_groups():
    assert group_layers({}) == ()


def test_alternating_layers_are_two_groups_of_equal_size():
    assert group_layers(windows_of("5f5f5f")) == (LayerGroup(500, (0, 2, 4)), LayerGroup(None, (1, 3, 5)))


def test_five_sliding_layers_for_each_full_one_are_cut_to_the_number_of_full_ones():
    groups = group_layers(windows_of("55555f" * 2))
    assert sizes(groups) == [(500, 2)] * 5 + [(None, 2)]
    assert groups[0].layers == (0, 1)
    assert groups[-1].layers == (5, 11)


def test_a_remainder_is_the_last_group_of_its_window():
    assert sizes(group_layers(windows_of("55555fff"))) == [(500, 3), (500, 2), (None, 3)]


def test_the_size_that_leaves_no_place_empty_is_taken_before_a_larger_one():
    assert sizes(group_layers(windows_of("5555ff7777"))) == [
        (500, 2),
        (500, 2),
        (None, 2),
        (700, 2),
        (700, 2),
    ]


def test_among_equal_waste_the_larger_size_gives_fewer_tables():
    # In pairs as well as in threes one place stays empty.
    assert sizes(group_layers(windows_of("555ff"))) == [(500, 3), (None, 2)]


def test_layers_that_are_not_paged_are_left_out_and_the_order_of_the_mapping_does_not_matter():
    windows = windows_of("f-f-f")
    assert group_layers(windows) == (LayerGroup(None, (0, 2, 4)),)
    assert group_layers(dict(reversed(windows.items()))) == group_layers(windows)


def test_groups_are_records_that_can_be_compared_but_not_changed():
    (group,) = group_layers({0: None})
    assert group == LayerGroup(None, (0,))
    assert hash(group) == hash(LayerGroup(None, (0,)))
    with pytest.raises(AttributeError):
        group.window = 4


WINDOWS = st.dictionaries(st.integers(0, 80), st.sampled_from([None, None, 128, 512, 4096]), min_size=1, max_size=60)


@given(WINDOWS)
def test_every_layer_is_in_exactly_one_group_with_its_own_window(windows):
    groups = group_layers(windows)
    assert sorted(layer for group in groups for layer in group.layers) == sorted(windows)
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert list(group.layers) == sorted(group.layers)


@given(WINDOWS)
def test_groups_are_of_one_size_but_for_the_last_of_each_window(windows):
    groups = group_layers(windows)
    size = max(len(group.layers) for group in groups)
    for window in set(windows.values()):
        lengths = [len(group.layers) for group in groups if group.window == window]
        assert lengths[:-1] == [size] * (len(lengths) - 1)
        assert 0 < lengths[-1] <= size


@given(WINDOWS)
def test_no_other_size_leaves_fewer_places_empty(windows):
    counts = [list(windows.values()).count(window) for window in set(windows.values())]
    groups = group_layers(windows)
    size = max(len(group.layers) for group in groups)
    empty = sum(size - len(group.layers) for group in groups)
    for other in counts:
        wasted = sum(-(-count // other) * other - count for count in counts)
        assert (empty, -size) <= (wasted, -other)
