"""Chat templates: what is passed on, what is refused, and that it equals transformers' own."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from cbengine.errors import InvalidRequestError, UnsupportedFeatureError
from cbengine.text.chat import apply_chat_template
from tests.text.tokenizers import byte_level, real, tokenizer_of, wrap

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Sure, it"}
TALK = [{"role": "system", "content": "Be kind."}, USER, ANSWER, {"role": "user", "content": "日本語?"}]

PLAIN = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.role }}]{{ m.content + '|' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


def tokenizer_with(template: Any) -> Any:
    return wrap(byte_level(), chat_template=template)


@pytest.mark.parametrize("messages", [[USER], TALK, tuple(TALK), [MappingProxyType(USER)]])
def test_equals_transformers(messages: Any) -> None:
    expected = real("smollm2").apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer_of("smollm2").apply_chat_template(messages) == expected
    assert expected.endswith("<|im_start|>assistant\n")


def test_the_messages_are_left_alone() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    apply_chat_template(tokenizer_with(PLAIN), [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}


def test_without_an_opened_answer() -> None:
    assert apply_chat_template(tokenizer_with(PLAIN), [USER], add_generation_prompt=False) == "[user]Hi|"
    assert apply_chat_template(tokenizer_with(PLAIN), [USER]) == "[user]Hi|[assistant]"


def test_the_last_message_can_be_continued() -> None:
    text = apply_chat_template(real("smollm2"), [USER, ANSWER], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nSure, it")
    with pytest.raises(InvalidRequestError, match="needs a last message of role 'assistant'"):
        apply_chat_template(real("smollm2"), [USER], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="give one of them"):
        apply_chat_template(real("smollm2"), [USER, ANSWER], continue_final_message=True, add_generation_prompt=True)


def test_tools_and_options_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    text = apply_chat_template(tokenizer_with(PLAIN), [USER], tools=[tool], mood="calm")
    assert text == '[user]Hi|[{"type": "function", "function": {"name": "f", "parameters": {}}}]calm[assistant]'


def test_a_template_of_the_caller() -> None:
    assert apply_chat_template(wrap(byte_level()), [USER], chat_template="{{ messages[0].content }}!") == "Hi!"


def test_one_of_several_templates() -> None:
    tokenizer = tokenizer_with({"default": "default", "short": "short"})
    assert apply_chat_template(tokenizer, [USER]) == "default"
    assert apply_chat_template(tokenizer, [USER], chat_template="short") == "short"


def test_a_base_model_has_no_template() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"no chat template.*chat_template="):
        tokenizer_of("gemma3").apply_chat_template([USER])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (None, "list of mappings.*not NoneType"),
        ("Hi", "list of mappings.*not str"),
        ({"role": "user", "content": "Hi"}, "list of mappings.*not dict"),
        ([], "no messages"),
        (["Hi"], r"messages\[0\] is a str"),
        ([USER, {"content": "Hi"}], r'messages\[1\]\["role"\] is None'),
        ([{"role": 3, "content": "Hi"}], r'"role"\] is 3'),
        ([{"role": "", "content": "Hi"}], r'"role"\] is \'\''),
        ([{"role": "user"}], r'"content"\] is None or missing'),
        ([{"role": "user", "content": 5}], r'"content"\] is a int'),
        ([{"role": "user", "content": ["Hi"]}], r'"content"\]\[0\] must be a mapping'),
        ([{"role": "user", "content": [{"type": "text"}]}], r'"text"\] must be a str'),
        ([{"role": "robot", "content": "Hi"}], "no robots"),
    ],
)
def test_bad_messages(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        apply_chat_template(tokenizer_with(PLAIN), messages)


def test_an_image_is_not_supported() -> None:
    with pytest.raises(UnsupportedFeatureError, match="type 'image_url'"):
        apply_chat_template(
            tokenizer_with(PLAIN), [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
        )


@pytest.mark.parametrize("options", [{"tokenize": True}, {"return_tensors": "pt"}, {"truncation": True}])
def test_options_that_would_change_the_result(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        apply_chat_template(tokenizer_with(PLAIN), [USER], **options)


@pytest.mark.parametrize("tools", ["f", {"name": "f"}, 3])
def test_bad_tools(tools: Any) -> None:
    with pytest.raises(InvalidRequestError, match="tools must be a list"):
        apply_chat_template(tokenizer_with(PLAIN), [USER], tools=tools)


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{% for %}", "{{ messages[9].content.x }}"])
def test_a_template_that_fails(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="refused the messages") as caught:
        apply_chat_template(tokenizer_with(template), [USER])
    assert caught.value.__cause__ is not None


def test_parts_of_text() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": content}]
    assert apply_chat_template(tokenizer_with(PARTS), messages) == "(one)(two)"
    assert apply_chat_template(tokenizer_with(PLAIN), messages) == "[user]one\ntwo|[assistant]"
    printing = "{{ messages[0].content }}"
    assert apply_chat_template(tokenizer_with(printing), messages) == "one\ntwo"


def test_a_call_of_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert apply_chat_template(tokenizer_with(PLAIN), [USER, call]) == "[user]Hi|[assistant]|[assistant]"
