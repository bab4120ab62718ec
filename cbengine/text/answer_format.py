"""In which form a model's answers hold tool calls and reasoning: found out from its chat template, or said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbengine.text.parts import Part, join_parts
from cbengine.text.reasoning import REASONING, AnswerParser, detect_reasoning, markers, opens_reasoning
from cbengine.text.structured_spec import AUTO, StructuredSpec
from cbengine.text.tool_calls import detect_format

if TYPE_CHECKING:
    from cbengine.text.base import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to read the answers of one request."""

    reasoning: str | None = None
    tools: str | None = None
    starts_in_reasoning: bool = False
    reasoning_is_over: bool = False
    """The prompt has an empty reasoning at its end: the model is not to reason."""
    keep: frozenset[int] = frozenset()
    """Special tokens whose names must be in the text, for they are marks."""

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        return AnswerParser(self.reasoning, self.tools, starts_in_reasoning=self.starts_in_reasoning)

    def constrain(self, spec: StructuredSpec) -> StructuredSpec:
        """`spec` for an answer of this format: reasoning is left free, unless the spec says something about it itself."""
        if self.reasoning is None or self.reasoning_is_over or spec.reasoning != AUTO:
            return spec
        return replace(spec, reasoning=self.reasoning, reasoning_opened=self.starts_in_reasoning)

    def parse(self, text: str) -> tuple[Part, ...]:
        """The parts of a whole answer."""
        parser = self.parser()
        return tuple(join_parts([*parser.push(text), *parser.flush()]))


def answer_format(
    tokenizer: Tokenizer, prompt: str, reasoning: str | None, tools: str | None, *, with_tools: bool
) -> AnswerFormat:
    """The format of the answers to a chat's `prompt`. "auto" asks the tokenizer's chat template.

    Raises:
        InvalidRequestError: there is no such format.
    """
    template = getattr(getattr(tokenizer, "hf", None), "chat_template", None)
    if reasoning == AUTO:
        reasoning = detect_reasoning(template)
    if tools == AUTO:
        tools = detect_format(template) if with_tools else None
    marks = markers(reasoning, tools)
    special = getattr(tokenizer, "ids_of_special", None)
    keep = special(marks) if special is not None and marks else frozenset[int]()
    over = reasoning is not None and prompt.rstrip().endswith(REASONING[reasoning][1])
    return AnswerFormat(reasoning, tools, opens_reasoning(prompt, reasoning), over, keep)
