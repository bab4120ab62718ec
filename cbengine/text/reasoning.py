"""Reasoning in streamed text, and answers as a whole: reasoning, text and tool calls told apart.

The formats of reasoning are "think", `<think>...</think>` (DeepSeek R1, Qwen 3, QwQ and most others), and "mistral",
`[THINK]...[/THINK]` (Magistral). Reasoning stands at the start of an answer. Templates of many models open it in the
prompt, so that only its end is in the answer: then the parser has to be told (`starts_in_reasoning`).

Blanks around the marks are part of neither the reasoning nor the text, but for those before the closing one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from cbengine.errors import InvalidRequestError
from cbengine.text.call_reader import skip_blanks
from cbengine.text.markers import possible_marker
from cbengine.text.parts import Part, PartList, ReasoningPart, TextPart, join_parts
from cbengine.text.tool_calls import PARSERS, make_parser

REASONING: Mapping[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""The formats of reasoning: the marks before and after it."""


class _At(enum.Enum):
    START = enum.auto()  # nothing but blanks has come
    REASONING_START = enum.auto()  # the same, within reasoning
    REASONING = enum.auto()
    AFTER = enum.auto()  # nothing but blanks has come since its end
    TEXT = enum.auto()


class ReasoningSplitter:
    """Tells the reasoning at the start of an answer from its text. One thread at a time.

    Only what may still be a mark is held back, and blanks before and after marks. What it gives depends on the text alone,
    not on how it is cut into pieces. Reasoning that does not end is reasoning to the end of the answer.
    """

    def __init__(self, format: str = "think", *, starts_in_reasoning: bool = False) -> None:
        self._open, self._close = REASONING[format]
        self._at = _At.REASONING_START if starts_in_reasoning else _At.START
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """Add text; return what is now certain."""
        if self._at is _At.TEXT:
            return [TextPart(text)] if text else []
        text = self._held + text
        out = PartList()
        at = 0
        while at < len(text):
            before = at, self._at
            at = self._step(text, at, out)
            if (at, self._at) == before:
                break
        self._held = text[at:]
        return out.parts

    def flush(self) -> list[Part]:
        """The answer has ended: what was held back."""
        held, at = self._held, self._at
        self._held, self._at = "", _At.TEXT
        inside = at in (_At.REASONING, _At.REASONING_START)
        if at in (_At.AFTER, _At.REASONING_START):
            held = held[skip_blanks(held, 0) :]
        return join_parts([ReasoningPart(held) if inside else TextPart(held)])

    def _step(self, text: str, at: int, out: PartList) -> int:
        """Read on from `at`; the same position, in the same state, if more has to be seen."""
        if self._at is _At.REASONING:
            end = text.find(self._close, at)
            if end >= 0:
                self._at = _At.AFTER
            stop = end if end >= 0 else possible_marker(text, at, (self._close,))
            out.add(ReasoningPart(text[at:stop]))
            return stop + len(self._close) if end >= 0 else stop
        if self._at is _At.TEXT:
            out.add(TextPart(text[at:]))
            return len(text)
        end = skip_blanks(text, at)
        if self._at is _At.AFTER:
            self._at = _At.TEXT if end < len(text) else _At.AFTER
            return end
        if text.startswith(self._open, end):  # some models open it though the prompt already did
            self._at = _At.REASONING_START
            return end + len(self._open)
        if self._open.startswith(text[end:]):
            return at
        inside = self._at is _At.REASONING_START
        self._at = _At.REASONING if inside else _At.TEXT
        return end if inside else at


class AnswerParser:
    """Tells the parts of one answer apart as its text comes. One thread at a time.

    Args:
        reasoning: a format of reasoning ("think", "mistral"), or None if the answer has none.
        tools: a format of tool calls ("hermes", "llama3", "mistral"), or None. Calls within reasoning are reasoning.
        starts_in_reasoning: the prompt has opened the reasoning (see `opens_reasoning`).
        make_id: see `tool_calls.make_parser`.

    Raises:
        InvalidRequestError: there is no such format.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        starts_in_reasoning: bool = False,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        _check_reasoning(reasoning)
        self._splitter = None
        if reasoning is not None:
            self._splitter = ReasoningSplitter(reasoning, starts_in_reasoning=starts_in_reasoning)
        self._calls = make_parser(tools, make_id) if tools is not None else None

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain. Their joined texts and arguments are all that there is."""
        if self._splitter is None:
            return self._to_calls([TextPart(text)])
        return self._to_calls(self._splitter.push(text))

    def flush(self) -> list[Part]:
        """The answer has ended: what was held back."""
        parts = self._to_calls(self._splitter.flush()) if self._splitter is not None else []
        return join_parts(parts + (self._calls.flush() if self._calls is not None else []))

    def _to_calls(self, parts: list[Part]) -> list[Part]:
        out = PartList()
        for part in parts:
            texts = self._calls.push(part.text) if self._calls and isinstance(part, TextPart) else [part]
            for piece in texts:
                out.add(piece)
        return out.parts


def markers(reasoning: str | None = None, tools: str | None = None) -> tuple[str, ...]:
    """The marks that an `AnswerParser` of these formats looks for, where they are special tokens too.

    `tokenizer.detokenizer(keep=tokenizer.ids_of_special(markers(...)))` gives a text that has them.
    """
    _check_reasoning(reasoning)
    if tools is not None:
        make_parser(tools)  # refuses a format that there is not
    return (REASONING[reasoning] if reasoning else ()) + (PARSERS[tools].MARKERS if tools else ())


def detect_reasoning(chat_template: str | Mapping[str, str] | None) -> str | None:
    """The format of reasoning whose marks are in a model's chat template (of several, in any of them), or None."""
    if not chat_template:
        return None
    text = chat_template if isinstance(chat_template, str) else "\n".join(map(str, chat_template.values()))
    return next((name for name, marks in REASONING.items() if marks[0] in text or marks[1] in text), None)


def opens_reasoning(prompt: str, reasoning: str | None) -> bool:
    """Whether a prompt ends with the mark before reasoning, so that the answer starts within it."""
    return reasoning is not None and prompt.rstrip().endswith(REASONING[reasoning][0])


def _check_reasoning(reasoning: str | None) -> None:
    if reasoning is not None and reasoning not in REASONING:
        raise InvalidRequestError(f"the format of reasoning must be one of {', '.join(REASONING)}, not {reasoning!r}")
