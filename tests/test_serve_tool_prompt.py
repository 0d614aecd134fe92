"""Tools in prompts of templates that know them, and of those that do not."""

from __future__ import annotations

import json

import tiny_tokenizers
from transformers import PreTrainedTokenizerFast

from hfpaged.serve.chat_prompt import chat_prompt
from hfpaged.serve.tool_calls import parser_for

NOW = {"type": "function", "function": {"name": "now", "description": "The time in a zone"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
TALK = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:30"}]},
]
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
KNOWING = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}{{ m['role'] }}: "
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.zone }}{% endfor %}\n{% endfor %}"
)


def text_of(template, messages, tools=None):
    plain = tiny_tokenizers.byte_level()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = template
    return chat_prompt(tokenizer, messages, tools=tools).text


def test_a_template_that_knows_tools_is_given_them():
    text = text_of(KNOWING, TALK, [NOW])
    assert text == "now\nuser: What time is it?assistant: CETtool: 12:30"


def test_another_one_is_told_in_the_systems_message():
    text = text_of(PLAIN, TALK, [NOW])
    assert text.startswith("system: You may call functions")
    assert json.dumps(NOW["function"]) in text
    assert "tool_response>\n12:30\n</tool_response>" in text
    assert "tool: " not in text
    assistant = text.split("assistant: ")[1].split("user:")[0]
    (piece,) = parser_for_hermes().feed(assistant.strip())
    assert (piece.call.name, json.loads(piece.call.arguments)) == ("now", {"zone": "CET"})


def parser_for_hermes():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level().backend_tokenizer)
    tokenizer.chat_template = PLAIN
    return parser_for(tokenizer, "", [NOW])


def test_the_systems_own_words_stay_first():
    system = {"role": "system", "content": "Be brief."}
    text = text_of(PLAIN, [system, *TALK], [NOW])
    assert text.startswith("system: Be brief.\n\nYou may call functions")
    assert text.count("system: ") == 1


def test_without_tools_nothing_is_said_of_them():
    assert text_of(PLAIN, TALK[:1]) == "user: What time is it?\n"
    assert "You may call" not in text_of(PLAIN, TALK)
