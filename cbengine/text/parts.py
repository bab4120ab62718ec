"""What an answer consists of once tool calls and reasoning are told apart from its text. Immutable values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A piece of one tool call, in the shape of OpenAI's streamed `tool_calls`.

    The first part of a call has `id` and `name`, and no arguments; those that follow have `arguments_delta` and nothing
    else. The deltas of one call, joined, are the JSON text of its arguments as the model wrote it.
    """

    index: int
    """Place of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments_delta: str = ""


Part = TextPart | ReasoningPart | ToolCallPart


class PartList:
    """Collects parts: pieces that belong together and follow each other become one, and none is empty."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(part, ToolCallPart):
            if part.name is None and isinstance(last, ToolCallPart) and last.name is None and last.index == part.index:
                self.parts[-1] = ToolCallPart(part.index, arguments_delta=last.arguments_delta + part.arguments_delta)
            elif part.name is not None or part.arguments_delta:
                self.parts.append(part)
        elif part.text:
            if type(last) is type(part):
                assert not isinstance(last, ToolCallPart) and last is not None
                self.parts[-1] = type(part)(last.text + part.text)
            else:
                self.parts.append(part)


def join_parts(parts: list[Part]) -> list[Part]:
    """The same parts with what belongs together joined: the same list however the answer was cut into pieces."""
    joined = PartList()
    for part in parts:
        joined.add(part)
    return joined.parts
