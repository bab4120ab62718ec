"""Tool calls in streamed text, as the common models write them.

- "hermes" (Hermes, Qwen 2.5, Qwen 3): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call.
- "llama3" (Llama 3.1, 3.2, 3.3): `{"name": "f", "parameters": {...}}` where a line begins, or after `<|python_tag|>`;
  several calls follow each other, with `;` or blanks between them.
- "mistral": `[TOOL_CALLS]` and then a list, `[{"name": "f", "arguments": {...}}, ...]`, or (tokenizers from version 11 on)
  `f[ARGS]{...}`, the mark once for each call, and with `[CALL_ID]` and an id before `[ARGS]` if the model gives one.

A parser gives text at once but for its end where that may still become a mark, the name of a call once its arguments
begin, and the arguments as they come, as the model wrote them: whether they are valid is the caller's to see. What only
looks like a call comes out as text, mark included, as soon as that is certain; what is wrong after a call's arguments have
begun ends the call, and the rest comes as text. Marks, the JSON around name and arguments, and blanks after a call are no
text. What a parser gives depends on the text alone, never on how it is cut into pieces.

Parsers are plain objects for one thread at a time, and wait for nothing. A mark that is a special token has no text unless
the detokenizer shows it: `TextTokenizer.detokenizer(keep=tokenizer.ids_of_special(markers))`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Protocol

from cbengine.errors import InvalidRequestError
from cbengine.text.call_machine import At, CallMachine
from cbengine.text.call_reader import JsonValue, skip_blanks
from cbengine.text.markers import find_marker, possible_marker
from cbengine.text.parts import Part


class ToolCallParser(Protocol):
    """Tells tool calls from text."""

    def push(self, text: str) -> list[Part]:
        """Add text; return what is now certain."""
        ...

    def flush(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...


class HermesParser(CallMachine):
    """See the module."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    MARKERS = (OPEN, CLOSE)


class LlamaParser(CallMachine):
    """See the module."""

    OPEN = "<|python_tag|>"
    BETWEEN = re.compile(r"[ \t\r\n;]*")
    MARKERS = (OPEN,)

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._line_start = True  # all that came since the last line break is blanks

    def give(self, text: str) -> None:
        _, line_break, line = text.rpartition("\n")
        self._line_start = not line.strip() and (self._line_start or bool(line_break))
        super().give(text)

    def end_call(self) -> None:
        super().end_call()
        self._line_start = False

    def in_text(self, at: int) -> int:
        found = find_marker(self.text, at, (self.OPEN, "{"))
        end = found[0] if found else possible_marker(self.text, at, (self.OPEN,))
        self.give(self.text[at:end])
        if found is None:
            return end
        if found[1] == self.OPEN:
            return self.open(end, end + len(self.OPEN))
        if self._line_start:
            return self.begin_object(end, strict=True)
        self.give("{")
        return end + 1

    def after(self, at: int) -> int:
        match = self.BETWEEN.match(self.text, at)
        end = match.end() if match else at
        if self.text.startswith("{", end):
            self.raw = self.text[at:end]
            return self.begin_object(end, strict=True)
        return super().after(at)


class MistralParser(CallMachine):
    """See the module."""

    OPEN = "[TOOL_CALLS]"
    ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
    MARKERS = (OPEN, ARGUMENTS, CALL_ID)
    WORD = re.compile(r"[\w.\-]*")
    MAX_WORD = 256

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._in_list = False
        self._name = ""
        self._id: str | None = None  # not None once its mark has come
        self._value = JsonValue()

    def opened(self, at: int) -> int:
        end = skip_blanks(self.text, at)
        self.raw += self.text[at:end]
        if end == len(self.text):
            return end
        self._in_list = self.text[end] == "["
        if self._in_list:
            self.raw += "["
            self.at = At.LISTED
            return end + 1
        if self.text[end] == "{":
            return self.begin_object(end)
        self._name, self._id = "", None
        self.at = At.NAME
        return end

    def end_call(self) -> None:
        self.at = At.LISTED if self._in_list else At.AFTER

    def in_list(self, at: int) -> int:
        """`raw` has something before the first object, and after a comma: then an object must come."""
        end = skip_blanks(self.text, at)
        if end == len(self.text):
            return at
        character = self.text[end]
        if self.raw and character == "{":
            self.raw += self.text[at:end]
            return self.begin_object(end)
        if not self.raw and character == ",":
            self.raw = self.text[at : end + 1]
            return end + 1
        if not self.raw and character == "]":
            self.at = At.AFTER
            return end + 1
        return self.refuse(at)

    def is_tail(self, rest: str) -> bool:
        return super().is_tail(rest) or (self.at is At.LISTED and rest.strip() in ("", ","))

    def in_name(self, at: int) -> int:
        """The name, and then perhaps the id: a word, and a mark or the arguments behind it."""
        word = self._name if self._id is None else self._id
        match = self.WORD.match(self.text, at)
        end = min(match.end() if match else at, at + self.MAX_WORD - len(word))
        word += (piece := self.text[at:end])
        self.raw += piece
        if self._id is None:
            self._name = word
        else:
            self._id = word
        if end == len(self.text):
            return end
        if word and self.text[end] == "{" and self._id is None:
            self.at = At.NAMED
            return end
        return self._mark_after_name(end) if word else self.refuse(end)

    def _mark_after_name(self, at: int) -> int:
        marks = (self.ARGUMENTS, self.CALL_ID) if self._id is None else (self.ARGUMENTS,)
        for mark in marks:
            if self.text.startswith(mark, at):
                self.raw += mark
                if mark == self.CALL_ID:
                    self._id = ""
                else:
                    self.at = At.NAMED
                return at + len(mark)
        waiting = any(mark.startswith(self.text[at:]) for mark in marks)
        return at if waiting else self.refuse(at)

    def named(self, at: int) -> int:
        end = skip_blanks(self.text, at)
        self.raw += self.text[at:end]
        if end == len(self.text):
            return end
        if self.text[end] != "{":
            return self.refuse(end)
        self.begin_call(self._name, self._id)
        self._value = JsonValue()
        self.at = At.ARGUMENTS
        return end

    def in_arguments(self, at: int) -> int:
        end = self._value.feed(self.text, at)
        self.argue(self.text[at:end])
        if self._value.broken:
            return self.refuse(end)
        if self._value.done:
            self.end_call()
        return end


PARSERS: Mapping[str, type[CallMachine]] = {"hermes": HermesParser, "llama3": LlamaParser, "mistral": MistralParser}
"""The formats of tool calls, by name."""

# Formats that are not read here, though their templates have one of our marks: Qwen 3 Coder, GLM 4.5, Llama 4, and others.
_FOREIGN = ("<function=", "<arg_key>", "<parameter=", "<|tool_calls_section_begin|>", "<｜tool")
_BY_TEMPLATE = (
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|python_tag|>", '{"name": function name, "parameters": dictionary', "Environment: ipython")),
)
_BY_NAME = (
    ("hermes", re.compile(r"hermes|qwen-?(2\.5|3)(?!.*coder)", re.IGNORECASE)),
    ("llama3", re.compile(r"llama-?3\.[123]", re.IGNORECASE)),
    ("mistral", re.compile(r"(mi|mini|magi|dev|code)stral|mixtral", re.IGNORECASE)),
)


def detect_format(chat_template: str | Mapping[str, str] | None, model_name: str = "") -> str | None:
    """Which of the formats a model writes tool calls in: "hermes", "llama3", "mistral", or None for none of them.

    Found by the marks in its chat template (of several templates, in any of them). The model's name counts only where
    there is no template.
    """
    if chat_template:
        text = chat_template if isinstance(chat_template, str) else "\n".join(map(str, chat_template.values()))
        if any(mark in text for mark in _FOREIGN):
            return None
        return next((name for name, marks in _BY_TEMPLATE if any(mark in text for mark in marks)), None)
    return next((name for name, pattern in _BY_NAME if pattern.search(model_name)), None)


def make_parser(format: str, make_id: Callable[[], str] | None = None) -> ToolCallParser:
    """A parser for one answer.

    Args:
        format: "hermes", "llama3" or "mistral".
        make_id: makes the ids of calls to which the model gives none. Default: `call_` and 24 hexadecimal digits; for
            Mistral, whose templates take no others, 9 letters and digits.

    Raises:
        InvalidRequestError: there is no such format.
    """
    if format not in PARSERS:
        raise InvalidRequestError(f"the format of tool calls must be one of {', '.join(PARSERS)}, not {format!r}")
    return PARSERS[format](make_id or (_short_id if format == "mistral" else _long_id))


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
