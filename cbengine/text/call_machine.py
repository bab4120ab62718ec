"""What the parsers of tool calls have in common: a machine that goes over the text once, whatever pieces it comes in."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import ClassVar

from cbengine.text.call_reader import CallReader, skip_blanks
from cbengine.text.markers import possible_marker
from cbengine.text.parts import Part, PartList, TextPart, ToolCallPart


class At(enum.Enum):
    """Where in the text a parser is. The value names the method that reads on from there."""

    TEXT = "in_text"
    OPENED = "opened"  # after a mark
    CALL = "in_call"  # in an object with name and arguments
    AFTER = "after"  # after a call, where another one or text may follow
    LISTED = "in_list"  # after an object in a list of them
    NAME = "in_name"  # in a name that stands by itself
    NAMED = "named"  # after its mark, before the arguments
    ARGUMENTS = "in_arguments"  # in arguments that stand by themselves


class CallMachine:
    """A parser of one format; see `tool_calls` for what it gives.

    Each state's method reads on from a position of `text` and returns the new one. If it returns the same position and
    stays in its state, it has to see more: what is left waits in `_held` for the next push. What was read of a possible
    call is kept in `raw` until the call begins, and given as text if it is none.
    """

    OPEN: ClassVar[str]
    """The mark before a call."""
    CLOSE: ClassVar[str] = ""
    """The mark after it, if there is one."""
    BETWEEN: ClassVar[re.Pattern[str]] = re.compile(r"[ \t\r\n]*")
    """What is no text after a call if another one, or nothing, follows."""
    MARKERS: ClassVar[tuple[str, ...]]
    """All marks of the format: those of them that are special tokens have to be shown to the parser."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._held = ""
        self._calls = 0
        self._out = PartList()
        self.at = At.TEXT
        self.text = ""
        self.raw = ""
        self.reader = CallReader()

    def push(self, text: str) -> list[Part]:
        """Add text; return what is now certain."""
        self.text = self._held + text
        at = 0
        while at < len(self.text):
            before = at, self.at
            at = getattr(self, self.at.value)(at)
            if (at, self.at) == before:
                break
        self._held = self.text[at:]
        return self._taken()

    def flush(self) -> list[Part]:
        """The text has ended: what was held back."""
        rest = self.raw + self._held
        if not self.is_tail(rest):
            self.give(rest)
        self.raw = self._held = ""
        self.at = At.TEXT
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._out = self._out.parts, PartList()
        return parts

    def is_tail(self, rest: str) -> bool:
        """Whether what was held back at the end belongs to the call before: blanks, the start of the closing mark."""
        match = self.BETWEEN.match(rest)
        return self.at is At.AFTER and match is not None and self.CLOSE.startswith(rest[match.end() :])

    # --- states -------------------------------------------------------------------------------------------------------

    def in_text(self, at: int) -> int:
        found = self.text.find(self.OPEN, at)
        if found < 0:
            end = possible_marker(self.text, at, (self.OPEN,))
            self.give(self.text[at:end])
            return end
        self.give(self.text[at:found])
        return self.open(found, found + len(self.OPEN))

    def opened(self, at: int) -> int:
        end = skip_blanks(self.text, at)
        self.raw += self.text[at:end]
        if end == len(self.text):
            return end
        return self.begin_object(end) if self.text[end] == "{" else self.refuse(end)

    def in_call(self, at: int) -> int:
        reader, begun = self.reader, self.reader.begun
        end = reader.feed(self.text, at)
        if not reader.begun:
            self.raw += self.text[at:end]
        else:
            if not begun:
                self.begin_call(reader.name or "", reader.id)
            self.argue(reader.take())
        if reader.broken:
            return self.refuse(end)
        if reader.done:
            self.end_call()
        return end

    def after(self, at: int) -> int:
        match = self.BETWEEN.match(self.text, at)
        end = match.end() if match else at
        if self.CLOSE and self.text.startswith(self.CLOSE, end):
            return end + len(self.CLOSE)
        if self.text.startswith(self.OPEN, end):
            return self.open(at, end + len(self.OPEN))
        rest = self.text[end:]
        if not (self.OPEN.startswith(rest) or self.CLOSE.startswith(rest)):
            self.at = At.TEXT
        return at

    # --- steps --------------------------------------------------------------------------------------------------------

    def open(self, start: int, end: int) -> int:
        """A mark ends at `end`; from `start` on all is text if no call follows."""
        self.raw = self.text[start:end]
        self.at = At.OPENED
        return end

    def begin_object(self, at: int, *, strict: bool = False) -> int:
        self.reader = CallReader(strict=strict)
        self.at = At.CALL
        return at

    def begin_call(self, name: str, call_id: str | None) -> None:
        """It is a call. What was read of it is no text."""
        self.raw = ""
        self._out.add(ToolCallPart(self._calls, call_id or self._make_id(), name))
        self._calls += 1

    def argue(self, text: str) -> None:
        self._out.add(ToolCallPart(self._calls - 1, arguments_delta=text))

    def end_call(self) -> None:
        self.at = At.AFTER

    def refuse(self, at: int) -> int:
        """It is no call, or no longer one: what was kept of it is text, and so is what follows, until the next mark."""
        self.give(self.raw)
        self.raw = ""
        self.at = At.TEXT
        return at

    def give(self, text: str) -> None:
        self._out.add(TextPart(text))
