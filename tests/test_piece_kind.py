from __future__ import annotations

from array import array

import pytest

from hfpaged.common_runs import LONG, Run, common_length, long_runs
from hfpaged.piece_kind import differing_pieces

KINDS = [
    ("It is 16:58:48 now", "It is 16:58:09 now", "16:58:48", "16:58:09", "time"),
    ("It is 9:58 now", "It is 16:58 now", "9:58", "16:58", "time"),
    ("at 4:58 PM, in", "at 5:01 PM, in", "4:58 PM", "5:01 PM", "time"),
    ("now=1764434328;", "now=1764434390;", "1764434328", "1764434390", "time"),
    ("on 2026-11-29T16:58", "on 2026-11-30T16:58", "2026-11-29", "2026-11-30", "date"),
    ("on 2026-11-29T16:58:01", "on 2026-11-29T16:59:01", "16:58:01", "16:59:01", "time"),
    ("Date: 29.11.2026\n", "Date: 2.12.2026\n", "29.11.2026", "2.12.2026", "date"),
    ("Date: 11/29/26.", "Date: 11/30/26.", "11/29/26", "11/30/26", "date"),
    (
        "is Sunday, 29 November 2026.",
        "is Monday, 30 November 2026.",
        "Sunday, 29 November 2026",
        "Monday, 30 November 2026",
        "date",
    ),
    ("Today is Nov 29, 2026 and", "Today is Nov 30, 2026 and", "Nov 29, 2026", "Nov 30, 2026", "date"),
    ("May 2026", "June 2026", "May 2026", "June 2026", "date"),
    ("a Tuesday here", "a Thursday here", "Tuesday", "Thursday", "date"),
    (
        "id 3f2b8c1e-0d5a-4f6b-9c7d-1e2f3a4b5c6d x",
        "id 3f2b8c1e-0d5a-4f6b-9c7d-1e2f3a4b5c6e x",
        "3f2b8c1e-0d5a-4f6b-9c7d-1e2f3a4b5c6d",
        "3f2b8c1e-0d5a-4f6b-9c7d-1e2f3a4b5c6e",
        "uuid",
    ),
    ("You have 12 mails", "You have 1,340 mails", "12", "1,340", "number"),
    ("User name: alice_1\n", "User name: bob\n", "alice_1", "bob", "user name"),
    ("User: Alice\nAnswer", "User: Alan\nAnswer", "Alice", "Alan", "user name"),
    ("Hello Alice Smith, you", "Hello Alice Jones, you", "Alice Smith", "Alice Jones", "user name"),
    ("mail ann@a.org now", "mail bob@b.org now", "ann@a.org", "bob@b.org", "user name"),
    ("it is 2026-11-29", "it is 16:58:09", "2026-11-29", "16:58:09", None),
    ("a cat sits", "a cow sits", "cat", "cow", None),
    ("user: What is it?", "user: Why is it?", "What", "Why", None),
    ("The user asks", "The user wants", "asks", "wants", None),
    ("room 42a x", "room 42b x", "42a", "42b", None),
    ("room 42 is", "room 42, so", "42 is", "42,", None),
    ("short", "short and long", "short", "short and", None),
]


@pytest.mark.parametrize(("here", "known", "first", "second", "kind"), KINDS)
def test_what_differs_is_shown_whole_and_its_kind_is_guessed(here, known, first, second, kind):
    assert differing_pieces(here, known) == (first, second, kind)
    assert differing_pieces(known, here) == (second, first, kind)


def test_a_word_without_an_end_is_cut():
    pieces = differing_pieces("x" * 100 + "a" * 100, "x" * 100 + "b" * 100)
    assert pieces == ("x" * 20 + "a" * 20, "x" * 20 + "b" * 20, None)


def numbers(*parts):
    return array("q", [number for part in parts for number in part])


def test_long_runs_are_found_behind_each_other_and_short_ones_are_not():
    first, second, short = range(100, 140), range(200, 220), range(300, 300 + LONG - 1)
    here = numbers([1, 2, 3], first, [4], short, [5, 6], second)
    known = numbers([7], first, short, [8, 9, 8, 9], second, [1, 2, 3])
    assert long_runs(here, known) == [
        Run(3, 1, 40),
        Run(44 + len(short) + 2, 41 + len(short) + 4, 20),
    ]


def test_runs_do_not_cross_and_no_number_is_counted_twice():
    first, second = range(100, 120), range(200, 230)
    assert long_runs(numbers(first, second), numbers(second, first)) == [Run(0, 30, 20)]
    same = numbers([5] * 50)
    assert long_runs(same, numbers([5] * 40)) == [Run(0, 0, 40)]
    assert long_runs(same, numbers()) == []


@pytest.mark.parametrize("differs_at", range(9))
def test_the_common_beginning_ends_at_the_first_difference(differs_at):
    first = array("q", range(8))
    second = array("q", [number + (at == differs_at) for at, number in enumerate(first)])
    assert common_length(first, second) == min(differs_at, 8)
