"""From a conversation to the prompt text, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cbengine.errors import InvalidRequestError, UnsupportedFeatureError

# Options of the tokenizer's method that would change what it returns: the prompt is a text here, and nothing else.
_FIXED_OPTIONS = {"conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict"}
_FIXED_OPTIONS |= {"return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation"}
_ALLOWED = (
    'messages must be a non-empty list of mappings such as {"role": "user", "content": "Hello"}, where content is a str'
    ' or a list of {"type": "text", "text": str}'
)


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    **options: Any,
) -> str:
    """The prompt text of a conversation, special tokens included: encode it with `add_special_tokens=False`.

    `tokenizer` is a transformers tokenizer. `messages` are mappings with `role` and `content`; an assistant's message
    may have `tool_calls` in place of content. `tools` (JSON schemas or functions) and `options` go to the template,
    which may ignore them. `chat_template` takes the place of the tokenizer's own (a Jinja text or, where the tokenizer
    has several, a name). `add_generation_prompt` (default True) opens the answer of the assistant.
    `continue_final_message=True` leaves the last message open instead, so that the answer continues it; that message
    must be the assistant's.

    Any thread, several at a time.

    Raises:
        UnsupportedFeatureError: there is no chat template, or a message has an image or the like.
        InvalidRequestError: the messages or options are malformed, or the template refuses them.
    """
    conversation = [_checked_message(message, index) for index, message in enumerate(_checked_list(messages))]
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    _check_continuation(conversation[-1], add_generation_prompt, continue_final_message)
    _check_options(tools, options)
    if not (chat_template or getattr(tokenizer, "chat_template", None)):
        raise UnsupportedFeatureError(
            "this model's tokenizer has no chat template (base models have none): use an instruction-tuned model, pass"
            " chat_template=<Jinja text>, or write the prompt as text and use stream() or generate()"
        )
    arguments: dict[str, Any] = {"tools": list(tools) if tools is not None else None, "chat_template": chat_template}
    arguments |= options
    if any(isinstance(message.get("content"), list) for message in conversation):
        conversation = _fit_parts(tokenizer, conversation, chat_template)
    arguments |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    return _render(tokenizer, conversation, arguments)


def _render(tokenizer: Any, conversation: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, **arguments)
    except ImportError as error:
        raise UnsupportedFeatureError(f"chat templates need Jinja: pip install 'jinja2>=3.1.6' ({error})") from error
    except Exception as error:  # a template is a program of the model's author, and the messages are its input
        raise InvalidRequestError(
            f"the chat template of this model refused the messages: {type(error).__name__}: {error}. Most templates"
            " want an optional system message first, then user and assistant in turn"
        ) from error


def _checked_list(messages: object) -> Sequence[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(f"{_ALLOWED}, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError(f"there are no messages: {_ALLOWED}")
    return messages


def _checked_message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"messages[{index}] is a {type(message).__name__}: {_ALLOWED}")
    checked: dict[str, Any] = dict(message)
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f'messages[{index}]["role"] is {role!r}: it must be a str such as "user"; {_ALLOWED}')
    content = checked.get("content")
    if isinstance(content, (list, tuple)):
        checked["content"] = [
            _checked_part(part, f'messages[{index}]["content"][{i}]') for i, part in enumerate(content)
        ]
    elif content is None and checked.get("tool_calls"):
        checked["content"] = ""  # a call of tools has no text; templates add the content to a str
    elif not isinstance(content, str):
        given = "None or missing" if content is None else f"a {type(content).__name__}"
        raise InvalidRequestError(f'messages[{index}]["content"] is {given}: {_ALLOWED}')
    return checked


def _checked_part(part: object, name: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidRequestError(
            f'{name} must be a mapping such as {{"type": "text", "text": "Hello"}}, not {part!r:.80}'
        )
    if part["type"] != "text":
        raise UnsupportedFeatureError(
            f'{name} has type {part["type"]!r}: only text is supported, {{"type": "text", ...}}'
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f'{name}["text"] must be a str')
    return dict(part)


def _check_continuation(last: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool) -> None:
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message=True continues the last message and add_generation_prompt=True begins a new one:"
            " give one of them"
        )
    if last["role"] != "assistant":
        raise InvalidRequestError(
            f"continue_final_message=True needs a last message of role 'assistant' to continue, not {last['role']!r}"
        )


def _check_options(tools: object, options: dict[str, Any]) -> None:
    fixed = sorted(_FIXED_OPTIONS & options.keys())
    if fixed:
        raise InvalidRequestError(
            f"the chat template gives a text here, so these options have no place: {', '.join(fixed)}"
        )
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, (str, bytes))):
        raise InvalidRequestError(f"tools must be a list of JSON schemas or functions, not {type(tools).__name__}")


def _fit_parts(tokenizer: Any, conversation: list[dict[str, Any]], chat_template: str | None) -> list[dict[str, Any]]:
    """Join lists of text parts (by newlines) where the template knows only plain strings.

    Found out by rendering a probe: such a template fails, or prints the list itself.
    """
    probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
    try:
        text = _render(tokenizer, probe, {"chat_template": chat_template})
    except InvalidRequestError:
        text = ""
    if "probe" in text and "'text'" not in text and '"text"' not in text:
        return conversation
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation
    ]
