"""Messages become the prompt that the model's own template writes."""

from __future__ import annotations

import copy

import pytest
import tiny_tokenizers

from hfpaged.serve.chat_prompt import chat_prompt
from hfpaged.serve.http_errors import ApiError

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}{{ c.function.arguments | tojson }}>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ hint or '' }}{% endif %}"
)
USER = {"role": "user", "content": "the quick fox"}


@pytest.fixture(scope="module")
def tokenizer():
    found = copy.deepcopy(tiny_tokenizers.byte_level())
    found.chat_template = TEMPLATE
    return found


def refused(tokenizer, messages, **settings):
    with pytest.raises(ApiError) as caught:
        chat_prompt(tokenizer, messages, **settings)
    return caught.value


def test_the_prompt_is_what_the_template_writes(tokenizer):
    prompt = chat_prompt(tokenizer, [{"role": "system", "content": "be kind"}, USER])
    assert prompt.text == "[system]be kind</s>[user]the quick fox</s>[assistant]"
    messages = [{"role": "system", "content": "be kind"}, USER]
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids == own


def test_parts_of_text_are_joined_and_nothing_is_changed_in_place(tokenizer):
    message = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]}
    before = copy.deepcopy(message)
    assert chat_prompt(tokenizer, [message]).text == "[user]one\ntwo</s>[assistant]"
    assert message == before


def test_the_last_message_can_go_on(tokenizer):
    messages = [USER, {"role": "assistant", "content": "jumps"}]
    prompt = chat_prompt(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == "[user]the quick fox</s>[assistant]jumps"
    both = refused(tokenizer, messages, continue_final_message=True)
    assert (both.status, both.param) == (400, "continue_final_message")


def test_a_developer_is_the_system_where_the_template_knows_none(tokenizer):
    assert chat_prompt(tokenizer, [{"role": "developer", "content": "x"}]).text.startswith("[system]x")
    knows = copy.deepcopy(tokenizer)
    knows.chat_template = "{# developer #}" + TEMPLATE
    assert chat_prompt(knows, [{"role": "developer", "content": "x"}]).text.startswith("[developer]x")


def test_arguments_of_tool_calls_come_as_objects(tokenizer):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "2"}
    text = chat_prompt(tokenizer, [USER, answer, result]).text
    assert '[assistant]<add{"x": 1}></s>[tool]2</s>' in text


def test_variables_go_to_the_template_but_no_other_arguments(tokenizer):
    assert chat_prompt(tokenizer, [USER], template_kwargs={"hint": "!"}).text.endswith("[assistant]!")
    for name in ("chat_template", "tokenize", "messages", "conversation"):
        error = refused(tokenizer, [USER], template_kwargs={name: "{{ 1 }}"})
        assert (error.status, error.param) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls"),
    ],
)
def test_a_wrong_message_is_named(tokenizer, message, param):
    error = refused(tokenizer, [message])
    assert (error.status, error.param) == (400, param)


def test_no_messages_and_no_template_are_told(tokenizer):
    assert refused(tokenizer, []).param == "messages"
    assert refused(tiny_tokenizers.word_piece(), [USER]).status == 422


def test_what_the_template_refuses_is_told_in_its_words(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    error = refused(strict, [USER])
    assert error.status == 400
    assert "roles must alternate" in error.message
