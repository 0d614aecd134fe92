"""Text that is streamed is the text that the tokenizer makes of all tokens at once."""

from __future__ import annotations

import copy
import time

import pytest
import tiny_tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfpaged.engine.detokenizer import Detokenizer
from hfpaged.engine.token_text import HALF

KINDS = list(tiny_tokenizers.ALL)
TEXTS = [
    "the fox stops here. stop!",
    "don't , we 've  said . they 're ? here",
    "你好世界 naïve café 🙂👨‍👩‍👧 e\u0301e\u0300",
    "👨‍👩‍👧‍👦" * 5,
    "ཨོཾ་མ་ཎི་པདྨེ་ཧཱུྃ་" * 3,
    "a" + HALF + "b" + HALF * 3,
    "  spaces   \n\n\tand more  ",
]
STOPS = ["stop", "op", "s", "st o", " the", "你好", "é", "🙂", "e\u0301", "ab"]
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def stream(detokenizer, token_ids, sizes=(1,)):
    """All pieces: tokens are given in portions of these sizes, again and again; the last is what finish() gives."""
    pieces, at, turn = [], 0, 0
    while at < len(token_ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.add(token_ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.finish()]


def cut_at_first(text, stops, include):
    """The judge: character by character, the stop string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_together_are_the_text(kind, text):
    tokenizer = tiny_tokenizers.ALL[kind]()
    token_ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(detokenizer, token_ids)) == detokenizer.text == whole


@slow
@given(data=st.data(), kind=st.sampled_from(KINDS), skip=st.booleans())
def test_pieces_of_any_tokens_are_what_the_tokenizer_makes_of_all(data, kind, skip):
    tokenizer = tiny_tokenizers.ALL[kind]()
    some = st.lists(st.integers(0, len(tokenizer) + 3), max_size=90)
    words = st.lists(st.sampled_from(TEXTS), max_size=2).map(lambda texts: tokenizer.encode(" ".join(texts)))
    token_ids = data.draw(
        st.one_of(some, words, st.tuples(some, words, some).map(lambda parts: [*parts[0], *parts[1], *parts[2]]))
    )
    assume(not any(is_long_and_broken(run) for run in byte_runs(tokenizer, token_ids, skip)))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    pieces = stream(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids, sizes)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def byte_runs(tokenizer, token_ids, skip):
    """The bytes that tokens of single bytes spell, run by run."""
    runs = [b""]
    for token in tokenizer.convert_ids_to_tokens(token_ids, skip_special_tokens=skip):
        if token is not None:
            is_byte = token.startswith("<0x")
            runs = [*runs[:-1], runs[-1] + bytes([int(token[3:5], 16)])] if is_byte else [*runs, b""]
    return runs


def is_long_and_broken(run):
    """The one thing that streams otherwise: most of it was given out before it turned out to be no text."""
    return len(run) >= 24 and HALF in run.decode(errors="replace")


@slow
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    stops=st.lists(
        st.sampled_from(["stop", "op", "s", "st o", " the", "你好", "é", "🙂", "e\u0301", "ab"]), max_size=4
    ),
    include=st.booleans(),
)
def test_text_ends_at_the_stop_string_that_is_complete_first_however_it_is_cut(data, kind, stops, include):
    tokenizer = tiny_tokenizers.ALL[kind]()
    words = st.sampled_from(["sto", "st", "stop", " the", "the ", "你", "好", "🙂", "ab", "a", "e\u0301", "café", "."])
    text = data.draw(st.lists(words, max_size=20).map("".join))
    token_ids = tokenizer.encode(text)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    detokenizer = Detokenizer(tokenizer, stops, include)
    pieces = stream(detokenizer, token_ids, sizes)
    expected, stopped_by = cut_at_first(tokenizer.decode(token_ids, skip_special_tokens=True), stops, include)
    assert ("".join(pieces), detokenizer.stopped_by) == (expected, stopped_by)
    assert detokenizer.text == expected
    assert detokenizer.add(token_ids) == detokenizer.finish() == "" or stopped_by is None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_has_half_a_character(kind):
    tokenizer = tiny_tokenizers.ALL[kind]()
    token_ids = [i for character in "🙂é你x🙂" for i in spelled(tokenizer, character)]
    assert len(token_ids) > 12
    pieces = stream(Detokenizer(tokenizer), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == "🙂é你x🙂"
    assert not any(HALF in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 1


def spelled(tokenizer, text):
    """A text by tokens of one byte each, or by its own where a tokenizer that falls back to bytes has one."""
    if tokenizer is tiny_tokenizers.byte_fallback():
        if text in tokenizer.get_vocab():
            return [tokenizer.get_vocab()[text]]
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])
    return tokenizer.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in text.encode()])


def test_what_may_become_a_stop_string_is_held_back_and_given_out_when_it_does_not():
    tokenizer = tiny_tokenizers.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["xyz"])
    pieces = [detokenizer.add(spelled(tokenizer, character)) for character in "axyxyq"]
    assert pieces == ["a", "", "", "xy", "", "xyq"]
    assert [detokenizer.add(spelled(tokenizer, c)) for c in "xyz"] == ["", "", ""]
    assert (detokenizer.stopped_by, detokenizer.finish()) == ("xyz", "")


def test_what_was_held_back_comes_when_no_more_tokens_do():
    tokenizer = tiny_tokenizers.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["xyz"])
    assert detokenizer.add(spelled(tokenizer, "xy")) == ""
    assert detokenizer.finish() == "xy"
    half = Detokenizer(tokenizer)
    assert half.add(spelled(tokenizer, "🙂")[:2]) == ""
    assert half.finish() == HALF


def test_characters_of_a_long_run_of_bytes_do_not_wait_for_its_end():
    tokenizer = tiny_tokenizers.byte_fallback()
    token_ids = [i for character in "好" * 40 for i in spelled(tokenizer, character)]
    pieces = stream(Detokenizer(tokenizer), token_ids)
    assert "".join(pieces) == "好" * 40
    assert max(map(len, pieces)) <= 10, "a reader would see nothing for a long time"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["text", "halves", "special"])
def test_a_token_costs_the_same_wherever_it_comes(kind, what):
    tokenizer = tiny_tokenizers.ALL[kind]()
    special = tokenizer.convert_tokens_to_ids("<|end|>")
    token_ids = {
        "text": tokenizer.encode("the quick 你好 fox. "),
        "halves": spelled(tokenizer, "🙂")[1:2] if kind in ("byte_level", "byte_fallback") else [5],
        "special": [special],
    }[what]
    decoded = []

    class Counting:
        """The tokenizer, with the number of tokens that are decoded."""

        def decode(self, ids, **options):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

        def __len__(self):
            return len(tokenizer)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    detokenizer = Detokenizer(Counting())
    repeats = 600 // len(token_ids)
    started = time.perf_counter()
    stream(detokenizer, token_ids * repeats)
    assert sum(decoded) < 40 * 600, f"{sum(decoded)} tokens were decoded, {time.perf_counter() - started:.2f} s"


def test_tokens_that_are_added_later_are_text_too():
    tokenizer = copy.deepcopy(tiny_tokenizers.byte_level())
    assert "".join(stream(Detokenizer(tokenizer), [len(tokenizer)])) == ""
    tokenizer.add_tokens(["[new]"])
    assert "".join(stream(Detokenizer(tokenizer), [len(tokenizer) - 1])) == "[new]"


@pytest.mark.demo_model
def test_the_demo_models_tokenizer_streams_what_it_decodes(demo):
    _, tokenizer = demo
    token_ids = [*tokenizer.encode(" ".join(TEXTS)), tokenizer.eos_token_id, *range(100, 49000, 371)]
    for skip in (True, False):
        pieces = stream(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
