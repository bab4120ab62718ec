"""Reading the JSON object of one tool call as it comes, whatever pieces it comes in."""

from __future__ import annotations

import enum
import json
import re

_STRING_STOP = re.compile(r'["\\]')
_VALUE_STOP = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[^\s,\]}]+")
_BLANK = re.compile(r"[ \t\r\n]*")
_CLOSES = {"{": "}", "[": "]"}
_MAX_NAME = 256


def skip_blanks(text: str, at: int) -> int:
    """Where the first character that is no JSON whitespace is."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


class JsonValue:
    """Where one JSON value ends. Looks at strings and brackets only: what is inside is the reader's business."""

    __slots__ = ("_escaped", "_open", "_scalar", "_string", "broken", "done")

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that will close the open ones
        self._string = False
        self._escaped = False
        self._scalar = False
        self.done = False
        self.broken = False
        """A bracket was closed that was not open."""

    def feed(self, text: str, at: int) -> int:
        """Go on with `text[at:]`. Returns where the value, or the text, ends; a bracket that breaks it is not part."""
        while at < len(text) and not self.done:
            if self._string:
                at = self._in_string(text, at)
            elif self._open:
                match = _VALUE_STOP.search(text, at)
                if match is None:
                    return len(text)
                if not self._bracket(match[0]):
                    return match.start()
                at = match.end()
            elif text[at] in '{["' and not self._scalar:
                self._bracket(text[at])
                at += 1
            else:  # a number, true, false, null: ends before what cannot be part of it
                self._scalar = True
                match = _SCALAR.match(text, at)
                at = match.end() if match else at
                self.done = at < len(text)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _STRING_STOP.search(text, at)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._string = False
            self.done = not self._open
        return match.end()

    def _bracket(self, character: str) -> bool:
        if character == '"':
            self._string = True
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
        elif self._open[-1] == character:
            self._open.pop()
            self.done = not self._open
        else:
            self.done = self.broken = True
            return False
        return True


class _At(enum.Enum):
    """What a `CallReader` expects next."""

    OBJECT = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    COMMA_OR_END = enum.auto()


class CallReader:
    """One object such as `{"name": "f", "arguments": {...}}`, from its brace on.

    A call `begun` has its name known: from then on `take` gives its arguments as they come. Arguments may be called
    `parameters`, may stand before the name (they are kept until it is known), may be a string that has the JSON, and may
    be missing (then they are `{}`). Other members are skipped.

    Args:
        strict: an object that nothing marks as a call is one only if its members have the names that calls have, and its
            arguments are an object.
    """

    KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})

    __slots__ = ("_arguments", "_at", "_given", "_key", "_out", "_pieces", "_strict", "_value", "begun", "broken", "done",
                 "id", "name")  # fmt: skip

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._at = _At.OBJECT
        self._key = ""
        self._value = JsonValue()
        self._pieces: list[str] = []  # of the key or value that is being read
        self._out: list[str] = []  # arguments that were not taken yet
        self._arguments = False  # the value being read is the arguments, and they go out as they come
        self._given = False  # arguments have been read
        self.name: str | None = None
        self.id: str | None = None
        self.begun = False
        self.done = False
        """The object has ended, and it was a call."""
        self.broken = False
        """It is no call, or no JSON: what follows is not read."""

    def take(self) -> str:
        """The arguments that have come since the last time."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def feed(self, text: str, at: int) -> int:
        """Go on with `text[at:]`. Returns where the object, what could be read of it, or the text ends."""
        while at < len(text) and not self.done and not self.broken:
            if self._at is _At.IN_VALUE or self._at is _At.KEY:
                at = self._feed_value(text, at)
            else:
                at = skip_blanks(text, at)
                if at < len(text):
                    at += self._punctuation(text[at])
        return at

    def _punctuation(self, character: str) -> int:
        """Go on with one character that is no blank; how many of it are used up."""
        at = self._at
        if at is _At.OBJECT and character == "{":
            self._at = _At.KEY_OR_END
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at is _At.COMMA_OR_END and character == ",":
            self._at = _At.KEY_OR_END
        elif at in (_At.COMMA_OR_END, _At.KEY_OR_END) and character == "}":
            self._end()
        elif at is _At.KEY_OR_END and character == '"':
            self._begin_value(_At.KEY)
            return 0
        elif at is _At.VALUE and self._accepts(character):
            self._begin_value(_At.IN_VALUE)
            return 0
        else:
            self.broken = True
            return 0
        return 1

    def _begin_value(self, at: _At) -> None:
        self._at = at
        self._value = JsonValue()

    def _accepts(self, character: str) -> bool:
        """Whether the value of the present key may begin so; the arguments begin the call here."""
        key = self._key
        if key == "name":
            return character == '"' and self.name is None
        if key in ("arguments", "parameters"):
            if self._given or not (character == "{" or (character in '"n' and not self._strict)):
                return False
            self._given = True
            self._arguments = character == "{"
            if self._arguments and self.name is not None:
                self.begun = True
            return True
        return character not in ",:]}" and (not self._strict or key in self.KEYS)

    def _feed_value(self, text: str, at: int) -> int:
        value = self._value
        if self._at is _At.IN_VALUE and self._arguments:
            end = value.feed(text, at)
            self._out.append(text[at:end])
        else:
            short = self._at is _At.KEY or self._key == "name"
            limit = at + _MAX_NAME - sum(map(len, self._pieces)) if short else len(text)
            end = value.feed(text[:limit], at)
            self._pieces.append(text[at:end])
            self.broken = end == limit < len(text) and not value.done
        if value.broken:
            self.broken = True
        elif value.done and not self.broken:
            self._end_value()
        return end

    def _end_value(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._at is _At.KEY:
            self._key = _decoded(text) or ""
            self._at = _At.COLON
            self.broken = self._strict and self._key not in self.KEYS
            return
        self._at = _At.COMMA_OR_END
        if self._arguments:
            self._arguments = False
        elif self._key == "name":
            self.name = _decoded(text)
            self.broken = not self.name
            self.begun = not self.broken and self._given
        elif self._key in ("arguments", "parameters"):
            content = "{}" if text == "null" else _decoded(text)
            self.broken = content is None or not content.lstrip().startswith("{")
            self._out.append(content or "")
            self.begun = not self.broken and self.name is not None
        elif self._key == "id" and not self.begun:
            self.id = _decoded(text)

    def _end(self) -> None:
        if self.name is None or (self._strict and not self._given):
            self.broken = True
            return
        if not self._given:
            self._out.append("{}")
        self.begun = self.done = True


def _decoded(text: str) -> str | None:
    """The string of a JSON string; None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
