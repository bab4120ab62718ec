"""Grammars of answers that begin with reasoning: it is free, and what follows it is what was asked for."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from cbengine.errors import InvalidRequestError
from cbengine.text.answer_format import answer_format
from cbengine.text.parts import ReasoningPart, TextPart
from cbengine.text.structured import Grammar, StructuredSpec, compile_grammar
from cbengine.text.tokenize import TextTokenizer
from tests.text.grammars import compiled, ids_of
from tests.text.tokenizers import byte_level, tokenizer_of, wrap

OBJECT = {"type": "object", "properties": {"a": {"enum": ["é", 7]}}, "required": ["a"], "additionalProperties": False}
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json_schema": OBJECT}, '{"a": "é"}'),
    "object": ({"json_object": True}, "{}"),
    "regex": ({"regex": "[a-z]+/[0-9]{2}"}, "ab/12"),
    "choice": ({"choice": ["yes", "no"]}, "no"),
    "grammar": ({"grammar": 'start: thing+ "."\nthing: "<" /[a-z]/ ">"\n'}, "<a><b>."),
}


def accepted(grammar: Grammar, ids: list[int]) -> tuple[int, bool]:
    """How many of the tokens the grammar takes, always within what its mask allows, and whether it may end there."""
    state, mask = grammar.start(), np.zeros(grammar.words, np.int32)
    for count, token_id in enumerate(ids):
        state.fill_mask(mask)
        if not mask.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1:
            return count, state.may_end
        state.accept(token_id)
    return len(ids), state.may_end


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize("kind", ANSWERS)
def test_the_answer_follows_the_reasoning(kind: str, cut: int) -> None:
    fields, answer = ANSWERS[kind]
    tokenizer = tokenizer_of("smollm2")

    def takes(*parts: str, **more: Any) -> bool:
        ids: list[int] = []
        for part in parts:  # what a grammar is certain of comes as the tokenizer writes it; reasoning may come anyhow
            size = cut if part.endswith("</think>") else len(part) or 1
            for piece in (part[i : i + size] for i in range(0, len(part), size)):
                ids += tokenizer.encode(piece, add_special_tokens=False)
        return accepted(compiled("smollm2", StructuredSpec(**fields, **more)), ids) == (len(ids), True)

    thought = "\nIs 1 < 2 or </thin air>? {é: 🌊}\n\n</think>"
    for blanks in ("", "\n", "\n\n"):
        assert takes("<think>", thought, blanks, answer, reasoning="think")
        assert takes(thought, blanks, answer, reasoning="think", reasoning_opened=True)
    assert takes(answer, reasoning="think")  # it need not reason
    assert not takes(answer, reasoning="think", reasoning_opened=True)  # that is reasoning, which does not end
    assert not takes(thought, answer, reasoning="think")
    for reasoning in (None, "auto"):
        assert takes(answer, reasoning=reasoning)
        assert not takes("<think>", thought, answer, reasoning=reasoning)
    assert not takes("<think>", thought, answer, "~", reasoning="think")
    assert not takes("<think>", thought, "~", answer, reasoning="think")


@pytest.mark.parametrize("opened", [False, True])
def test_marks_that_are_special_tokens(opened: bool) -> None:
    hf = wrap(byte_level(), eos_token="<e>")
    hf.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer = TextTokenizer(hf)
    spec = StructuredSpec(choice=["ok"], reasoning="mistral", reasoning_opened=opened)
    grammar = compile_grammar(spec, tokenizer, 320)
    begin, end = (tokenizer.special_tokens[mark] for mark in ("[THINK]", "[/THINK]"))
    thought, written, ok = ([i for c in text for i in tokenizer.encode(c)] for text in ("é so", "[/THINK]", "ok"))
    head = [] if opened else [begin]
    for text in (thought, thought + written, written + thought):
        ids = [*head, *text, end, *ok]
        assert accepted(grammar, ids) == (len(ids), True)
        assert accepted(grammar, [*head, *text, *written, *ok])[1] is False
    assert accepted(grammar, [*head, *thought, begin])[0] == len(head) + len(thought)


def test_random_answers_have_reasoning_and_what_was_asked_for() -> None:
    tokenizer = tokenizer_of("smollm2")
    form = answer_format(tokenizer, "Think. <think>\n", "think", None, with_tools=False)
    grammar = compiled("smollm2", form.constrain(StructuredSpec(json_schema=OBJECT)))
    ending = tokenizer.encode("</think>\n", add_special_tokens=False)
    for seed in range(12):
        rng, state, ids = random.Random(seed), grammar.start(), []
        mask = np.zeros(grammar.words, np.int32)
        while not state.finished and len(ids) < 200:
            state.fill_mask(mask)
            choices = ids_of(mask)
            ids.append(ending[len(ids) - 6] if 6 <= len(ids) < 6 + len(ending) else rng.choice(choices))
            state.accept(ids[-1])
        assert state.finished
        parts = form.parse(tokenizer.decode(ids))
        assert [type(part) for part in parts] == [ReasoningPart, TextPart]
        assert isinstance(parts[1], TextPart) and json.loads(parts[1].text)["a"] in ("é", 7)


def test_which_answers_may_reason() -> None:
    tokenizer, spec = tokenizer_of("smollm2"), StructuredSpec(choice=["a"])

    def asked(prompt: str, reasoning: str | None, spec: StructuredSpec = spec) -> tuple[str | None, bool]:
        made = answer_format(tokenizer, prompt, reasoning, None, with_tools=False).constrain(spec)
        return made.reasoning, made.reasoning_opened

    assert asked("Hello", None) == ("auto", False)
    assert asked("Hello", "think") == ("think", False)
    assert asked("Hello <think>\n", "think") == ("think", True)
    assert asked("Hello <think>\n\n</think>\n\n", "think") == ("auto", False)  # told not to
    assert asked("Hello", "think", StructuredSpec(choice=["a"], reasoning=None)) == (None, False)
    own = StructuredSpec(choice=["a"], reasoning="mistral")
    assert asked("Hello <think>", "think", own) == ("mistral", False)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InvalidRequestError, match="think, mistral, 'auto' or None, got 'thoughts'"):
        StructuredSpec(choice=["a"], reasoning="thoughts")
    with pytest.raises(InvalidRequestError, match="needs reasoning"):
        StructuredSpec(choice=["a"], reasoning_opened=True)
    with pytest.raises(InvalidRequestError, match="list `grammars`"):
        compiled("smollm2", StructuredSpec(grammar='{"lark": 1}', reasoning="think"))
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        compiled("smollm2", StructuredSpec(regex="[", reasoning="think"))
