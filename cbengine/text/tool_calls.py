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

Parsers are plain objects for one thread at a time, and wait for nothing.
"""

from __future__ import annotations

import enum
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cbengine.errors import InvalidRequestError
from cbengine.text.call_reader import CallReader, JsonValue, skip_blanks
from cbengine.text.markers import find_marker, possible_marker
from cbengine.text.parts import Part, PartList, TextPart, ToolCallPart

FORMATS = ("hermes", "llama3", "mistral")


class ToolCallParser(Protocol):
    """Tells tool calls from text."""

    def push(self, text: str) -> list[Part]:
        """Add text; return what is now certain."""
        ...

    def flush(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...


class _At(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()  # after a mark
    CALL = enum.auto()  # in an object with name and arguments
    NAME = enum.auto()  # in a bare name (Mistral)
    ARGUMENTS = enum.auto()  # in bare arguments (Mistral)
    LISTED = enum.auto()  # after an object in a list (Mistral)
    AFTER = enum.auto()  # after a call, where another one or text may follow


class _Parser:
    """What the formats have in common: a machine that goes over the text once.

    Each state has a method that reads on from a position of `self._text` and returns the new one. One that returns the
    same position without changing the state has to see more text; what is left then waits in `_held`.
    """

    OPEN: str
    """The mark before a call."""
    CLOSE = ""
    """The mark after it, if there is one."""
    BETWEEN = re.compile(r"[ \t\r\n]*")
    """What may be left out after a call."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._at = _At.TEXT
        self._text = ""
        self._held = ""
        self._raw = ""  # of what may be a call: read, but given back as text if it is none
        self._reader = CallReader()
        self._calls = 0
        self._out = PartList()
        self._steps: dict[_At, Callable[[int], int]] = {
            _At.TEXT: self._in_text, _At.OPENED: self._opened, _At.CALL: self._in_call, _At.AFTER: self._after,
        }  # fmt: skip

    def push(self, text: str) -> list[Part]:
        """See `ToolCallParser.push`."""
        self._text = self._held + text
        at = self._run(0)
        self._held = self._text[at:]
        parts, self._out = self._out.parts, PartList()
        return parts

    def _run(self, at: int) -> int:
        while at < len(self._text):
            before = at, self._at
            at = self._steps[self._at](at)
            if (at, self._at) == before:
                break
        return at

    def flush(self) -> list[Part]:
        """See `ToolCallParser.flush`."""
        rest = self._raw + self._held
        if self._at is _At.AFTER and self._is_tail(rest):
            rest = ""
        self._give(rest)
        self._raw = self._held = ""
        self._at = _At.TEXT
        parts, self._out = self._out.parts, PartList()
        return parts

    def _is_tail(self, rest: str) -> bool:
        """Whether this, the last text after a call, is blanks and the start of the closing mark."""
        match = self.BETWEEN.match(rest)
        return match is not None and self.CLOSE.startswith(rest[match.end() :])

    # --- the states ---------------------------------------------------------------------------------------------------

    def _in_text(self, at: int) -> int:
        text = self._text
        found = text.find(self.OPEN, at)
        end = found if found >= 0 else possible_marker(text, at, (self.OPEN,))
        self._give(text[at:end])
        return self._open(found, self.OPEN) if found >= 0 else end

    def _open(self, at: int, mark: str) -> int:
        """A mark begins here."""
        self._raw = mark
        self._at = _At.OPENED
        return at + len(mark)

    def _opened(self, at: int) -> int:
        text, start = self._text, at
        at = skip_blanks(text, at)
        self._raw += text[start:at]
        if at == len(text):
            return at
        return self._begin_object(at) if text[at] == "{" else self._refuse(at)

    def _begin_object(self, at: int, *, strict: bool = False) -> int:
        self._reader = CallReader(strict=strict)
        self._at = _At.CALL
        return at

    def _in_call(self, at: int) -> int:
        reader = self._reader
        begun = reader.begun
        end = reader.feed(self._text, at)
        if reader.begun:
            if not begun:
                self._begin_call(reader.name or "", reader.id)
            self._argue(reader.take())
        else:
            self._raw += self._text[at:end]
        if reader.broken:
            return self._refuse(end)
        if reader.done:
            self._end_call()
        return end

    def _after(self, at: int) -> int:
        text = self._text
        match = self.BETWEEN.match(text, at)
        end = match.end() if match else at
        for mark in filter(None, (self.CLOSE, self.OPEN)):
            if text.startswith(mark, end):
                return self._open(end, mark) if mark == self.OPEN else end + len(mark)
            if mark.startswith(text[end:]):
                return at
        self._at = _At.TEXT
        return at

    # --- what comes out -----------------------------------------------------------------------------------------------

    def _give(self, text: str) -> None:
        self._out.add(TextPart(text))

    def _refuse(self, at: int) -> int:
        """This is no call, or no longer one: what was kept of it is text, and so is what follows, until the next mark."""
        self._give(self._raw)
        self._raw = ""
        self._at = _At.TEXT
        return at

    def _begin_call(self, name: str, call_id: str | None) -> None:
        self._raw = ""
        self._out.add(ToolCallPart(self._calls, call_id or self._make_id(), name))
        self._calls += 1

    def _argue(self, text: str) -> None:
        self._out.add(ToolCallPart(self._calls - 1, arguments_delta=text))

    def _end_call(self) -> None:
        self._at = _At.AFTER


class HermesParser(_Parser):
    """See the module."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"


class LlamaParser(_Parser):
    """See the module. `_line_start`: all that was given since the last line break is blanks."""

    OPEN = "<|python_tag|>"
    BETWEEN = re.compile(r"[ \t\r\n;]*")

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._line_start = True

    def _give(self, text: str) -> None:
        head, _, line = text.rpartition("\n")
        if text:
            self._line_start = not line.strip() and (self._line_start or bool(head) or text.startswith("\n"))
        super()._give(text)

    def _in_text(self, at: int) -> int:
        text = self._text
        found = find_marker(text, at, (self.OPEN, "{"))
        end = found[0] if found else possible_marker(text, at, (self.OPEN,))
        self._give(text[at:end])
        if found is None:
            return end
        if found[1] == self.OPEN:
            return self._open(end, self.OPEN)
        if self._line_start:
            return self._begin_object(end, strict=True)
        self._give("{")
        return end + 1

    def _after(self, at: int) -> int:
        match = self.BETWEEN.match(self._text, at)
        end = match.end() if match else at
        if self._text.startswith("{", end):
            self._raw = self._text[at:end]
            return self._begin_object(end, strict=True)
        start, self._line_start = self._at, False
        at = super()._after(at)
        self._line_start = self._at is start
        return at


class MistralParser(_Parser):
    """See the module."""

    OPEN = "[TOOL_CALLS]"
    ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
    _WORD = re.compile(r"[\w.\-]*")
    _MAX_WORD = 256

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._steps |= {_At.NAME: self._in_name, _At.ARGUMENTS: self._in_arguments, _At.LISTED: self._in_list}
        self._list = False
        self._words: list[str] = []  # the bare name, and the id after it
        self._value = JsonValue()

    def _opened(self, at: int) -> int:
        text, start = self._text, at
        at = skip_blanks(text, at)
        self._raw += text[start:at]
        if at == len(text):
            return at
        self._list = text[at] == "["
        if self._list:
            self._raw += "["
            self._at = _At.LISTED
            return at + 1
        if text[at] == "{":
            return self._begin_object(at)
        self._words = [""]
        self._at = _At.NAME
        return at

    def _end_call(self) -> None:
        self._at = _At.LISTED if self._list else _At.AFTER

    def _in_list(self, at: int) -> int:
        """Between the objects of a list; `_raw` is empty after the first."""
        text, start = self._text, at
        at = skip_blanks(text, at)
        if at == len(text):
            return start
        first, more = self._raw.endswith("["), self._raw.endswith(",")
        if text[at] == "{" and (first or more):
            self._raw += text[start:at]
            return self._begin_object(at)
        if text[at] == "," and not first and not more:
            self._raw = text[start : at + 1]
            return at + 1
        if text[at] == "]" and not first and not more:
            self._raw = ""
            self._at = _At.AFTER
            return at + 1
        return self._refuse(start)

    def _in_name(self, at: int) -> int:
        text = self._text
        match = self._WORD.match(text, at)
        end = match.end() if match else at
        end = min(end, at + self._MAX_WORD - len(self._words[-1]))
        self._words[-1] += text[at:end]
        self._raw += text[at:end]
        if end == len(text):
            return end
        if self._words[-1]:
            for mark in (self.ARGUMENTS, self.CALL_ID)[: 3 - len(self._words)]:
                if text.startswith(mark, end):
                    return self._after_name(end, mark)
                if mark.startswith(text[end:]):
                    return end
            if text[end] == "{" and len(self._words) == 1:
                return self._begin_arguments(end)
        return self._refuse(end)

    def _after_name(self, at: int, mark: str) -> int:
        self._raw += mark
        at += len(mark)
        if mark == self.CALL_ID:
            self._words.append("")
        else:
            self._words.append("")
            self._at = _At.ARGUMENTS
            self._value = JsonValue()
        return at

    def _begin_arguments(self, at: int) -> int:
        self._at = _At.ARGUMENTS
        self._value = JsonValue()
        return at

    def _in_arguments(self, at: int) -> int:
        return at


_PARSERS: Mapping[str, type[_Parser]] = {"hermes": HermesParser, "llama3": LlamaParser, "mistral": MistralParser}
