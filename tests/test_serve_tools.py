"""Answers taken apart: calls, thoughts and content of each family, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from hfpaged.serve.delimiters import Delimited
from hfpaged.serve.prose import Piece, joined
from hfpaged.serve.tool_calls import answer_form, parser_for

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"city": "São Paulo", "days": 3}
TEXT = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
CALL = ("get_weather", ARGUMENTS)
NOW = ("now", {})
PYTHON = json.dumps({"name": "get_weather", "parameters": ARGUMENTS})

# What the chat template contains, special tokens, the answer -> content, reasoning, calls.
CASES = {
    "hermes": ("<tool_call>", (), f"<tool_call>\n{TEXT}\n</tool_call>", "", "", [CALL]),
    "hermes with words": ("<tool_call>", (), f"Let me see. \n\n<tool_call>\n{TEXT}\n</tool_call>\n", "Let me see.", "",
                          [CALL]),
    "hermes two": ("<tool_call>", (), f'<tool_call>{TEXT}</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>',
                   "", "", [CALL, NOW]),
    "hermes cut": ("<tool_call>", (), f"<tool_call>\n{TEXT[:-3]}", f"<tool_call>\n{TEXT[:-3]}", "", []),
    "hermes without its end": ("<tool_call>", (), f"<tool_call>\n{TEXT}", "", "", [CALL]),
    "hermes broken": ("<tool_call>", (), 'So:\n<tool_call>{"nome": 1}</tool_call> and', 'So:\n<tool_call>{"nome": 1}'
                      "</tool_call> and", "", []),
    "hermes broken and whole": ("<tool_call>", (), f"<tool_call>?</tool_call>\n<tool_call>{TEXT}</tool_call>",
                                "<tool_call>?</tool_call>", "", [CALL]),
    "hermes with its end in a text": (
        "<tool_call>", (), '<tool_call>{"name": "now", "arguments": {"x": "a </tool_call> b"}}</tool_call>', "", "",
        [("now", {"x": "a </tool_call> b"})]),
    "hermes arguments as text": ("<tool_call>", (), '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", "",
                                 [NOW]),
    "hermes special": ("<tool_call>", ("<tool_call>", "</tool_call>", "<|im_end|>"),
                       f"<tool_call>\n{TEXT}\n</tool_call><|im_end|>", "", "", [CALL]),
    "no call at all": ("<tool_call>", (), "  plain <tool> text < \n", "  plain <tool> text < \n", "", []),
    "thought": ("<think> <tool_call>", (), f"<think>\nHm. \n</think>\n\n<tool_call>{TEXT}</tool_call>", "", "Hm.",
                [CALL]),
    "thought and words": ("<think> <tool_call>", (), "<think>\nHm.</think>\n\nHello <think> you", "Hello <think> you",
                          "Hm.", []),
    "thought without an end": ("<think> <tool_call>", (), "<think>\nHm. Ha", "", "Hm. Ha", []),
    "empty thought": ("<think> <tool_call>", (), "<think>\n\n</think>\n\nHello", "Hello", "", []),
    "qwen3 coder": (
        "<tool_call> <function=", (),
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>", "I look.", "", [CALL]),
    "qwen3 coder types": (
        "<tool_call> <function=", (),
        "<tool_call><function=get_weather><parameter=city>12</parameter><parameter=exact>True</parameter>"
        '<parameter=tags>["a"]</parameter><parameter=note>None</parameter></function></tool_call>', "", "",
        [("get_weather", {"city": "12", "exact": True, "tags": ["a"], "note": None})]),
    "qwen3 coder with its end in a text": (
        "<tool_call> <function=", (),
        "<tool_call><function=now><parameter=x>\na\n</tool_call>\nb\n</parameter></function></tool_call>", "", "",
        [("now", {"x": "a\n</tool_call>\nb"})]),
    "qwen3 coder broken": ("<tool_call> <function=", (), "<tool_call><function=now> ha </function></tool_call>",
                           "<tool_call><function=now> ha </function></tool_call>", "", []),
    "llama": ("<|python_tag|>", ("<|python_tag|>", "<|eot_id|>"), f"{PYTHON}<|eot_id|>", "", "", [CALL]),
    "llama tagged": ("<|python_tag|>", ("<|python_tag|>", "<|eom_id|>"),
                     f'<|python_tag|>{PYTHON}; {{"name": "now"}}<|eom_id|>', "", "", [CALL, NOW]),
    "llama by its words": ('"parameters": dictionary', (), PYTHON, "", "", [CALL]),
    "llama other JSON": ("<|python_tag|>", (), '{"name": "Bob"}', '{"name": "Bob"}', "", []),
    "llama words": ("<|python_tag|>", (), 'See {"name": "now"}', 'See {"name": "now"}', "", []),
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]", "</s>"), f'[TOOL_CALLS] [{TEXT}, {{"name": "now", "arguments": {{}}}}]'
                "</s>", "", "", [CALL, NOW]),
    "mistral named": ("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"),
                      f'Well.[TOOL_CALLS]get_weather[ARGS]{json.dumps(ARGUMENTS)}[TOOL_CALLS]now[ARGS]{{}}', "Well.",
                      "", [CALL, NOW]),
    "mistral ids": ("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
                    "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", "", "", [NOW]),
    "mistral broken": ("[TOOL_CALLS]", ("[TOOL_CALLS]",), "[TOOL_CALLS]what?", "[TOOL_CALLS]what?", "", []),
    "gemma": ("<|tool_call>", ("<|tool_call>", "<tool_call|>", '<|"|>'),
              '<|tool_call>call:get_weather{city:<|"|>São "Paulo": x,y:<|"|>,days:3}<tool_call|>', "", "",
              [("get_weather", {"city": 'São "Paulo": x,y:', "days": 3})]),
    "gemma thinks": ("<|channel>thought\n <|tool_call>", ("<|channel>", "<channel|>", "<turn|>"),
                     "<|channel>thought\nHm.<channel|>Hello<turn|>", "Hello", "Hm.", []),
    "functiongemma": ("<start_function_call>", ("<start_function_call>", "<end_function_call>", "<escape>"),
                      "<start_function_call>call:get_weather{city:<escape>São Paulo<escape>,days:3}<end_function_call>",
                      "", "", [CALL]),
    "deepseek": ("<｜tool▁call▁begin｜>", (), "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                 f"get_weather\n```json\n{json.dumps(ARGUMENTS)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now"
                 "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Ok", "", [CALL, NOW]),
    "granite": ("<|tool_call|>", ("<|tool_call|>",), f"<|tool_call|>[{TEXT}]", "", "", [CALL]),
}  # fmt: skip


def tokenizer_with(template, special=(), **attributes):
    plain = tiny_tokenizers.byte_level()  # a copy, as tokens are added
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=type(plain.backend_tokenizer).from_str(
        plain.backend_tokenizer.to_str()), eos_token="</s>")  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in special]})
    tokenizer.chat_template = "{{ tools }}" + template.replace("{", "").replace("}", "")
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def parsed(parser, pieces):
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.end()
    assert all(bool(piece.content) + bool(piece.reasoning) + (piece.call is not None) == 1 for piece in found)
    calls = [piece.call for piece in found if piece.call]
    assert len({call.id for call in calls}) == len(calls)
    return (
        "".join(piece.content for piece in found),
        "".join(piece.reasoning for piece in found),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


def cut(text, places):
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    template, special, answer, *expected = CASES[request.param]
    tokenizer = tokenizer_with(template, special)
    form = answer_form(tokenizer, TOOLS)
    return lambda: parser_for(tokenizer, "", TOOLS, form), answer, tuple(expected)


def test_whole_answers(case):
    make, answer, expected = case
    assert parsed(make(), [answer]) == expected


def test_each_cut_in_two_gives_the_same(case):
    make, answer, expected = case
    for place in range(len(answer) + 1):
        assert parsed(make(), [answer[:place], answer[place:]]) == expected


def test_characters_give_the_same_and_in_their_order(case):
    make, answer, expected = case
    assert parsed(make(), answer) == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_cut_of_any_mixture_gives_the_same(data):
    """Of texts that nobody would write, too."""
    name = data.draw(st.sampled_from(list(CASES)))
    answer = CASES[name][2]
    form = answer_form(tokenizer_of(name), TOOLS)
    parts = [answer, answer[: len(answer) // 2], "<", "{", " \n", "</think>", "<think>", "abc", *form.silent[:2]]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=5)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = parsed(parser_for(tokenizer_of(name), "", TOOLS, form), [text])
    assert parsed(parser_for(tokenizer_of(name), "", TOOLS, form), cut(text, places)) == whole


_MADE: dict = {}


def tokenizer_of(name):
    if name not in _MADE:
        _MADE[name] = tokenizer_with(CASES[name][0], CASES[name][1])
    return _MADE[name]


def test_content_is_given_out_before_a_call_is_whole(case):
    parser = parser_for(tokenizer_with("<tool_call>"), "", TOOLS)
    assert parser.feed("Let me ") == [Piece(content="Let me")]
    assert parser.feed("see. <tool") == [Piece(content=" see.")]
    assert parser.feed("_call>") == []
    assert parser.feed(TEXT) == []
    assert parser.feed("</tool_call>")[0].call.name == "get_weather"


def test_a_prompt_that_opens_the_thought():
    tokenizer = tokenizer_with("<think>")
    parser = parser_for(tokenizer, "<|im_start|>assistant\n<think>\n")
    assert parsed(parser, ["Hm. ", "</think>", "\n\nYes."]) == ("Yes.", "Hm.", [])
    parser = parser_for(tokenizer, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert parsed(parser, ["Yes."]) == ("Yes.", "", [])


def test_what_needs_no_parser_has_none():
    assert parser_for(tokenizer_with("plain"), "", None) is None
    assert parser_for(tokenizer_with("<tool_call>"), "", []) is None


def test_templates_without_tools_are_asked_in_hermes_way():
    parser = parser_for(tokenizer_with("plain"), "", TOOLS)
    assert parsed(parser, [f"<tool_call>{TEXT}</tool_call>"]) == ("", "", [CALL])


def test_special_tokens_are_wanted_only_where_they_are_delimiters():
    assert not answer_form(tokenizer_with("<tool_call>", ("<|im_end|>",)), TOOLS).keeps_special
    assert answer_form(tokenizer_with("[TOOL_CALLS]", ("[TOOL_CALLS]",)), TOOLS).keeps_special
    assert not answer_form(tokenizer_with("[TOOL_CALLS]", ("[TOOL_CALLS]",)), None).keeps_special


def test_mistral_ids_are_as_its_template_wants_them():
    parser = parser_for(tokenizer_with("[TOOL_CALLS]"), "", TOOLS)
    call = next(piece.call for piece in [*parser.feed("[TOOL_CALLS]now{}"), *parser.end()] if piece.call)
    assert len(call.id) == 9
    assert call.id.isalnum()


HOST = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}  # fmt: skip
HOST_CASES = [
    (f"Hello <call>{TEXT}</call><|end|>", ("Hello", "", [CALL])),
    (f"<think>\nHm.\n</think>\nHello\n<call>{TEXT}</call><call>{TEXT}</call>", ("Hello", "Hm.", [CALL, CALL])),
    ("Hello <call>{broken</call> and more<|end|>", ("Hello{broken</call> and more", "", [])),
    ("Hello <call>[1]</call>", ("Hello[1]</call>", "", [])),
    (f"<call>{TEXT}", ("", "", [CALL])),
    (f"Hi <call>{TEXT[:-3]}", (f"Hi{TEXT[:-3]}", "", [])),
    ("Only words.\n", ("Only words.\n", "", [])),
]


@pytest.mark.parametrize(("answer", "expected"), HOST_CASES)
def test_transformers_own_parser_reads_what_the_tokenizer_describes(answer, expected):
    tokenizer = tokenizer_with("<tool_call>", ("<|end|>",), response_template=HOST)
    assert answer_form(tokenizer, TOOLS).keeps_special
    assert parsed(parser_for(tokenizer, "<|im_start|>assistant\n", TOOLS), [answer]) == expected
    for place in range(len(answer) + 1):
        parser = parser_for(tokenizer, "<|im_start|>assistant\n", TOOLS)
        assert parsed(parser, [answer[:place], answer[place:]]) == expected
    assert parsed(parser_for(tokenizer, "<|im_start|>assistant\n", TOOLS), answer) == expected


@given(st.text("ab<", max_size=12), st.lists(st.sampled_from(["ab", "a", "b<", "ab<a", "<<"]), max_size=4), st.data())
def test_delimiters_are_found_the_same_however_the_text_is_cut(text, delimiters, data):
    def cuts(pieces):
        found, delimited = [], Delimited()
        for index, piece in enumerate([*pieces, ""]):
            delimited.feed(piece)
            while True:
                taken = delimited.take(delimiters, is_last=index == len(pieces))
                found.append(taken.text)
                if taken.delimiter is None:
                    break
                found.append((taken.delimiter,))
        merged = []
        for part in filter(None, found):
            if merged and isinstance(part, str) and isinstance(merged[-1], str):
                merged[-1] += part
            else:
                merged.append(part)
        return merged

    places = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    assert cuts(cut(text, places)) == cuts([text])


def test_pieces_of_a_kind_are_one():
    assert joined([Piece("a"), Piece(), Piece("b"), Piece(reasoning="c")]) == [Piece("ab"), Piece(reasoning="c")]
