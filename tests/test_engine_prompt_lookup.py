from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfpaged.engine.prompt_lookup import FIRST, PromptLookup
from hfpaged.errors import InvalidConfigError


def ids(*numbers):
    return array("q", numbers)


def trusted(num_tokens, max_ngram=3, min_ngram=2):
    """One whose guesses have all been right so far."""
    lookup = PromptLookup(num_tokens, max_ngram, min_ngram)
    lookup.told(num_tokens, num_tokens)
    return lookup


def test_what_followed_the_last_tokens_before_is_guessed():
    assert trusted(3).propose(ids(1, 2, 3, 4, 5, 6, 1, 2)) == [3, 4, 5]


def test_nothing_is_guessed_behind_tokens_that_were_not_there_before():
    for tokens in (ids(), ids(7), ids(7, 7), ids(1, 2, 3, 4), ids(1, 2, 3, 9, 2)):
        assert trusted(3).propose(tokens) == []


def test_the_longest_ngram_decides_and_of_equals_the_last():
    assert trusted(1).propose(ids(1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3)) == [40]
    assert trusted(1, max_ngram=2).propose(ids(1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3)) == [50]
    assert trusted(1, 1, 1).propose(ids(1, 40, 1, 50, 1)) == [50]


def test_what_repeats_is_expected_to_go_on_repeating():
    assert trusted(5).propose(ids(9, 9, 9)) == [9, 9, 9, 9, 9]
    assert trusted(7).propose(ids(8, 1, 2, 3, 1, 2, 3, 1, 2)) == [3, 1, 2, 3, 1, 2, 3]


def test_tokens_that_come_later_are_found_too():
    lookup, tokens = trusted(2), ids(1, 2, 3)
    assert lookup.propose(tokens) == []
    tokens.extend([4, 5, 1, 2])
    assert lookup.propose(tokens) == [3, 4]
    tokens.extend([3, 7, 1, 2, 3])
    assert lookup.propose(tokens) == [7, 1]
    assert lookup.propose(tokens) == [7, 1]


REPEATING = ids(*([1, 2, 3] * 5))


def test_right_guesses_bring_more_and_wrong_ones_fewer():
    lookup = PromptLookup(12)
    lengths = []
    for accepted in (FIRST, 4, 8, 12, 5, 5, 3, 0, 0, 1, 2):
        lengths.append(len(lookup.propose(REPEATING)))
        lookup.told(lengths[-1], accepted)
    assert lengths == [FIRST, 4, 8, 12, 12, 5, 10, 3, 1, 1, 2]


def test_guesses_that_found_no_room_in_the_step_take_no_trust_away():
    lookup = trusted(8)
    lookup.told(0, 0)
    assert len(lookup.propose(REPEATING)) == 8
    lookup.told(2, 2)
    assert len(lookup.propose(REPEATING)) == 8
    lookup.told(2, 1)
    assert len(lookup.propose(REPEATING)) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
def test_there_are_never_more_guesses_than_asked_for(num_tokens):
    lookup = PromptLookup(num_tokens)
    for _ in range(6):
        guesses = lookup.propose(REPEATING)
        assert 1 <= len(guesses) <= num_tokens
        lookup.told(len(guesses), len(guesses))
    assert len(guesses) == num_tokens


def guesses_of_a_search(tokens, num_tokens, max_ngram, min_ngram):
    """All earlier places of the final n-grams, looked for from the end."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                going_on = tokens[end:]
                while len(going_on) < num_tokens:
                    going_on = going_on + going_on
                return going_on[:num_tokens]
    return []


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=8),
    num_tokens=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_any_sequence_gives_what_a_search_from_its_end_finds(pieces, num_tokens, sizes):
    lookup, tokens = trusted(num_tokens, max(sizes), min(sizes)), array("q")
    for piece in pieces:
        tokens.extend(piece)
        assert lookup.propose(tokens) == guesses_of_a_search(tokens.tolist(), num_tokens, max(sizes), min(sizes))


def num_right(guesses, following):
    wrong = [number for number, (guess, token) in enumerate(zip(guesses, following, strict=False)) if guess != token]
    return wrong[0] if wrong else min(len(guesses), len(following))


def test_text_that_copies_itself_needs_few_steps():
    """Verification of one sequence: of the guesses those are right that the text goes on with."""
    generator = random.Random(0)
    once = [generator.randrange(1000) for _ in range(200)]
    text = once + once
    lookup, tokens, steps = PromptLookup(8), array("q", text[:202]), 0
    while len(tokens) < len(text):
        guesses = lookup.propose(tokens)
        accepted = num_right(guesses, text[len(tokens) :])
        lookup.told(len(guesses), accepted)
        tokens.extend(text[len(tokens) :][: accepted + 1])
        steps += 1
    assert steps <= 198 / 9 + 3


def test_a_call_costs_as_much_as_its_new_tokens_however_long_the_sequence_is():
    generator = random.Random(0)

    def best_time(length):
        lookup, times = PromptLookup(8), []
        tokens = array("q", [generator.randrange(1000) for _ in range(length)])
        lookup.propose(tokens)
        for _ in range(50):
            tokens.append(generator.randrange(1000))
            start = time.perf_counter()
            lookup.propose(tokens)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_time(50_000) < 10 * best_time(50)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (4, 1, 2), (4, 3, 0), (-1, 3, 2)])
def test_sizes_that_cannot_be_are_refused(sizes):
    num_tokens, max_ngram, min_ngram = sizes
    with pytest.raises(InvalidConfigError, match=rf"num_tokens={num_tokens}, min_ngram={min_ngram}, max_ngram="):
        PromptLookup(num_tokens, max_ngram, min_ngram)
