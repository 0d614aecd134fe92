"""How data become texts of one length."""

from __future__ import annotations

import pytest
import torch
from quality_model import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from hfpaged.errors import InvalidConfigError
from hfpaged.quality.contexts import FED, TEXTS, Context, fit_all, parse_contexts
from hfpaged.quality.corpus import BUILT_IN, Corpus, built_in_text, load_corpus

NOTHING = torch.tensor([], dtype=torch.int64)


def corpus(size, start=NOTHING):
    return Corpus("numbers", torch.arange(size), start)


def test_no_token_is_scored_twice_and_none_comes_twice_in_a_text():
    context = Context("300", 300)
    texts = corpus(2000).texts(context, 12)
    assert texts.shape == (12, 301)
    targets = texts[:, context.prompt + 1 :]
    assert len(targets.unique()) == targets.numel() == 12 * FED
    assert all(len(row.unique()) == 301 for row in texts)


def test_a_text_goes_on_at_the_beginning_of_the_data_only_where_these_end():
    texts = corpus(1000).texts(Context("500", 500), 7)
    steps = (texts[:, 1:] - texts[:, :-1]).unique().tolist()
    assert steps == [-999, 1]


def test_the_longest_text_has_all_data():
    context = Context("max", None).fitted(None, 1000)
    assert (context.cached, context.note) == (999, "")
    (row,) = corpus(1000).texts(context, 1)
    assert sorted(row.tolist()) == list(range(1000))


def test_little_data_give_fewer_texts():
    assert corpus(400).texts(Context("short", 128), TEXTS).shape == (3, 129)


def test_each_text_begins_with_the_token_that_the_tokenizer_puts_there():
    texts = corpus(1000, torch.tensor([7777])).texts(Context("short", 128), 4)
    assert texts.shape == (4, 129)
    assert texts[:, 0].tolist() == [7777] * 4
    assert 7777 not in texts[:, 1:]


def test_a_tokenizer_that_begins_texts_is_recognized():
    plain = byte_tokenizer()
    assert load_corpus(None, plain).start.tolist() == []
    beginning = byte_tokenizer()
    beginning.bos_token = "<end>"
    beginning.backend_tokenizer.post_processor = processor()
    assert isinstance(beginning, PreTrainedTokenizerFast)
    found = load_corpus(None, beginning)
    assert found.start.tolist() == [256]
    assert 256 not in found.ids


def processor():
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 256)])


def test_short_texts_are_fed_but_for_their_first_token_and_long_ones_at_their_end():
    assert (Context("short", 128).prompt, Context("short", 128).fed) == (1, 127)
    assert (Context("1k", 1024).prompt, Context("1k", 1024).fed) == (896, 128)


def test_lengths_are_read_once_each_and_in_order():
    assert [context.length for context in parse_contexts("1k, short,1k,300,max")] == [1024, 128, 300, None]


def test_what_the_model_has_no_positions_for_is_cut_and_said():
    short, long = fit_all(parse_contexts("short,4k"), positions=2048, available=10_000)
    assert (short.cached, short.note) == (128, "")
    assert (long.cached, long.note) == (2048, "cut from 4096 to 2048 tokens, the model's most")


def test_of_two_lengths_that_come_out_alike_the_first_is_kept():
    assert [one.name for one in fit_all(parse_contexts("1k,4k,max"), 512, 10_000)] == ["1k"]


def test_the_most_that_the_data_allow_is_said():
    (context,) = fit_all(parse_contexts("max"), 8192, 5001)
    assert (context.cached, context.note) == (5000, "5000 of the model's 8192 positions, the data have no more")


@pytest.mark.parametrize("text", ["", "long", "2k", "7", "-5", "short,,1k", "1.5k"])
def test_what_is_no_length_is_named(text):
    with pytest.raises(InvalidConfigError, match="a length is one of short, 1k, 4k, max, or a number"):
        parse_contexts(text)


@pytest.mark.parametrize(("name", "available", "needed"), [("1k", 1024, 1025), ("short", 5, 129), ("max", 5, 9)])
def test_data_that_are_too_few_are_an_error_with_both_numbers(name, available, needed):
    with pytest.raises(InvalidConfigError, match=f"have {available} tokens, and context {name} needs {needed}"):
        fit_all(parse_contexts(name), 4096, available)


def test_the_built_in_text_is_long_enough_for_every_named_length_of_the_demo_model():
    text = built_in_text()
    assert len(text.split()) > 7000
    assert len(text) > 40_000  # of which the demo model's tokenizer makes 10,000 tokens
    assert text.isascii() or text.encode()  # and nothing that does not encode
    assert load_corpus(None, byte_tokenizer()).name == BUILT_IN


@pytest.mark.demo_model
def test_the_built_in_text_fills_all_positions_of_the_demo_model(demo):
    model, tokenizer = demo
    found = load_corpus(None, tokenizer)
    positions = model.config.max_position_embeddings
    assert found.available > positions
    assert Context("max", None).fitted(positions, found.available) == Context("max", positions)


def test_a_file_is_read_as_utf8(tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes("Grüße".encode())
    found = load_corpus(str(path), byte_tokenizer())
    assert found.name == str(path)
    assert len(found.ids) == 7


def test_what_is_no_utf8_or_no_file_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"abc\xfc")
    with pytest.raises(InvalidConfigError, match=r"latin.txt is not UTF-8: byte 3 cannot be decoded"):
        load_corpus(str(path), byte_tokenizer())
    with pytest.raises(InvalidConfigError, match="No such file"):
        load_corpus(str(tmp_path / "none.txt"), byte_tokenizer())
    with pytest.raises(InvalidConfigError, match="Is a directory"):
        load_corpus(str(tmp_path), byte_tokenizer())
