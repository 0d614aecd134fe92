from __future__ import annotations

import time
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hfpaged.common_runs import common_length
from hfpaged.engine.prefix_wait import Promises


def ids(*numbers):
    return array("q", numbers)


SHARED = ids(*range(1, 13))  # three blocks of four


def test_nobody_waits_where_nothing_is_promised():
    assert Promises(4).blocked_by("root", SHARED, 0) is None


def test_a_request_waits_for_full_blocks_that_are_not_computed_yet():
    promises = Promises(4)
    promises.promise("a", "root", SHARED, 12)
    assert promises.blocked_by("root", SHARED + ids(99), 0) == "a"
    promises.progress("a", 8)
    assert promises.blocked_by("root", SHARED + ids(99), 8) == "a"
    assert promises.blocked_by("root", SHARED[:8], 8) is None
    promises.progress("a", 11)
    assert promises.blocked_by("root", SHARED, 8) == "a"
    promises.progress("a", 12)
    assert promises.blocked_by("root", SHARED, 8) is None
    assert len(promises) == 0


def test_blocks_that_were_computed_and_lost_again_are_not_waited_for():
    promises = Promises(4)
    promises.promise("a", "root", SHARED + ids(0, 0, 0, 0), 16)
    promises.progress("a", 12)
    assert promises.blocked_by("root", SHARED + ids(7), 0) is None


def test_what_a_request_has_already_is_not_waited_for():
    promises = Promises(4)
    promises.promise("a", "root", SHARED, 8)
    assert promises.blocked_by("root", SHARED, 7) == "a"  # it has a part of the second block
    assert promises.blocked_by("root", SHARED, 8) is None


def test_only_full_blocks_below_until_are_promised():
    promises = Promises(4)
    promises.promise("a", "root", SHARED, 3)
    promises.promise("b", "root", ids(9, 9), 8)
    assert len(promises) == 0
    promises.promise("a", "root", SHARED, 7)
    assert promises.blocked_by("root", SHARED, 0) == "a"
    assert promises.blocked_by("root", SHARED, 4) is None


def test_other_roots_and_other_tokens_are_not_waited_for():
    promises = Promises(4)
    promises.promise("a", "root", SHARED, 12)
    assert promises.blocked_by("salted", SHARED, 0) is None
    assert promises.blocked_by("root", ids(1, 2, 3, 0) + SHARED[4:], 0) is None
    assert promises.blocked_by("root", SHARED[:3], 0) is None


def test_the_holder_that_reaches_furthest_is_told_and_of_equals_the_first():
    promises = Promises(4)
    promises.promise("short", "root", SHARED, 4)
    promises.promise("first", "root", SHARED, 12)
    promises.promise("second", "root", SHARED, 12)
    assert promises.blocked_by("root", SHARED, 0) == "first"
    assert promises.blocked_by("root", SHARED[:7], 0) == "short"
    promises.withdraw("first")
    assert promises.blocked_by("root", SHARED, 0) == "second"


def test_who_withdraws_is_not_waited_for_and_may_do_so_twice():
    promises = Promises(4)
    promises.promise("a", "root", SHARED, 12)
    promises.progress("a", 4)
    promises.withdraw("a")
    promises.withdraw("a")
    promises.progress("a", 12)
    assert promises.blocked_by("root", SHARED, 0) is None


def test_a_new_promise_replaces_the_one_before():
    promises = Promises(4)
    promises.promise("a", "root", SHARED, 12)
    promises.promise("a", "root", ids(9, 9, 9, 9), 4)
    assert promises.blocked_by("root", SHARED, 0) is None
    assert promises.blocked_by("root", ids(9, 9, 9, 9), 0) == "a"


BLOCK = 3
# Few tokens and few beginnings, so that promises meet often.
TOKENS = st.lists(st.integers(0, 1), max_size=14).map(lambda numbers: array("q", numbers))
HOLDERS = st.integers(0, 4)
ROOTS = st.sampled_from("xy")


class PromisesAgainstAList(RuleBasedStateMachine):
    """The judge keeps each promise as it was given, and compares all of them token by token."""

    def __init__(self):
        super().__init__()
        self.promises = Promises(BLOCK)
        self.given = {}  # holder -> [root, items, until, computed], in the order in which they were given

    def num_blocks(self, promise):
        _, items, until, _ = promise
        return min(until, len(items)) // BLOCK

    @rule(holder=HOLDERS, root=ROOTS, items=TOKENS, until=st.integers(0, 15))
    def promise(self, holder, root, items, until):
        self.promises.promise(holder, root, items, until)
        self.given.pop(holder, None)
        if min(until, len(items)) >= BLOCK:
            self.given[holder] = [root, items, until, 0]

    @rule(holder=HOLDERS, more=st.integers(0, 5))
    def progress(self, holder, more):
        promise = self.given.get(holder, ["", [], 0, 0])
        promise[3] += more
        self.promises.progress(holder, promise[3])
        if promise[3] // BLOCK >= self.num_blocks(promise):
            self.given.pop(holder, None)

    @rule(holder=HOLDERS)
    def withdraw(self, holder):
        self.promises.withdraw(holder)
        self.given.pop(holder, None)

    @rule(root=ROOTS, items=TOKENS, known=st.integers(0, 14))
    def ask(self, root, items, known):
        found = {}
        for holder, (other, promised, until, computed) in self.given.items():
            reach = min(common_length(items, promised), until) // BLOCK * BLOCK if other == root else 0
            if reach > known and computed // BLOCK * BLOCK < reach:
                found[holder] = reach
        # max() tells the first of equals
        assert self.promises.blocked_by(root, items, known) == max(found, key=found.get, default=None)

    @invariant()
    def nothing_is_left_of_promises_that_ended(self):
        assert len(self.promises) == len(self.given)
        assert all(holder in self.promises for holder in self.given)
        paths = {
            (root, tuple(items[:end]))
            for root, items, until, _ in self.given.values()
            for end in range(BLOCK, min(until, len(items)) + 1, BLOCK)
        }
        assert self.count(self.promises._top) == len(paths) + len({root for root, *_ in self.given.values()})

    def count(self, node):
        return sum(1 + self.count(child) for child in node.children.values())


PromisesAgainstAList.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_any_order_of_promises_and_questions_agrees_with_a_list = PromisesAgainstAList.TestCase


def test_a_question_costs_no_more_with_a_thousand_holders_that_begin_alike():
    begin = array("q", range(1024))
    waiting = begin + array("q", [-1] * 512)

    def best_time(num_holders):
        promises = Promises(16)
        for holder in range(num_holders):
            promises.promise(holder, "root", begin + array("q", [holder] * 64), 1088)
            promises.progress(holder, 1024)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert promises.blocked_by("root", waiting, 1024) is None
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_time(1000) < 10 * best_time(1)
