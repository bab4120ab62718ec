"""Reasoning told from text, alone and before tool calls; marks that are special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from cbengine.errors import InvalidRequestError
from cbengine.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, join_parts
from cbengine.text.reasoning import AnswerParser, detect_reasoning, markers, opens_reasoning
from cbengine.text.tokenize import TextTokenizer
from tests.text.test_tool_calls import cut
from tests.text.tokenizers import CharacterTokenizer, byte_level, joined, tiny, tokenizer_of, wrap


def parse(
    pieces: Iterable[str], reasoning: str | None = "think", tools: str | None = None, inside: bool = False
) -> list[Part]:
    """All parts, as they came."""
    parser = AnswerParser(reasoning, tools, starts_in_reasoning=inside, make_id=lambda: "id")
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.flush()


R, T = ReasoningPart, TextPart
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>'
CALLED = [ToolCallPart(0, "id", "f"), ToolCallPart(0, arguments_delta='{"a": "<think>"}')]


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [R("Hm.\n"), T("Yes.")]),
        ("\n <think>Hm.</think>Yes.", False, [R("Hm."), T("Yes.")]),
        ("Hm, 1 < 2.</think>\n\nYes.", True, [R("Hm, 1 < 2."), T("Yes.")]),
        ("<think>\nHm.</think>Yes.", True, [R("Hm."), T("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [T("Yes.")]),
        ("</think>Yes.", True, [T("Yes.")]),
        ("Yes.", False, [T("Yes.")]),
        ("  Yes <think>.</think>", False, [T("  Yes <think>.</think>")]),
        ("<think>a</think>b<think>c</think>", False, [R("a"), T("b<think>c</think>")]),
        ("<thin>Yes.", False, [T("<thin>Yes.")]),
        (" <thin", False, [T(" <thin")]),
        ("<think>a</think", False, [R("a</think")]),
        ("<think>a</ think></thinking", False, [R("a</ think></thinking")]),
        ("<think>never ends, 日本", False, [R("never ends, 日本")]),
        ("<think>  ", False, []),
        ("\n", True, []),
        ("<think>a</think>\n\n", False, [R("a")]),
        ("", False, []),
    ],
)
def test_reasoning(text: str, inside: bool, parts: list[Part]) -> None:
    for pieces in ([text], list(text)):
        assert join_parts(parse(pieces, inside=inside)) == parts


def test_each_format_and_none() -> None:
    assert parse(["[THINK]a", "[/THINK]b"], "mistral") == [R("a"), T("b")]
    assert parse(["<think>a", "</think>b"], None) == [T("<think>a"), T("</think>b")]
    assert parse(["<think>a", "</think>", CALL], None, "hermes") == [T("<think>a"), T("</think>"), *CALLED]


def test_reasoning_before_text_and_calls() -> None:
    text = "<think>\nI need <tool_call>.\n</think>\n\nOne moment.\n" + CALL + "\n" + CALL
    second = [ToolCallPart(1, "id", "f"), ToolCallPart(1, arguments_delta='{"a": "<think>"}')]
    expected = [R("I need <tool_call>.\n"), T("One moment.\n"), *CALLED, *second]
    for pieces in ([text], list(text)):
        assert join_parts(parse(pieces, tools="hermes")) == expected
    assert join_parts(parse(["hm</think>" + CALL], tools="hermes", inside=True)) == [R("hm"), *CALLED]
    assert parse(["hm</think>", "\n\n<tool_"], tools="hermes", inside=True) == [R("hm"), T("<tool_")]


def test_it_is_streamed() -> None:
    parser = AnswerParser("think", "hermes")
    pieces = ["<th", "ink>\n", "Let me", " see <", "/", "3.</think", ">\n", "\n", "So", " it is"]
    shown = [[], [], [R("Let me")], [R(" see ")], [], [R("</3.")], [], [], [T("So")], [T(" it is")]]
    assert [parser.push(piece) for piece in pieces] == shown
    assert parser.flush() == []


fragments = st.sampled_from(
    ["<think>", "</think>", "<thi", "nk>", "</th", "<", ">", " ", "\n", "é日👩", "hm", CALL, "<tool_call>", '{"a'],
)


@given(
    texts=st.lists(fragments, max_size=10),
    inside=st.booleans(),
    tools=st.sampled_from([None, "hermes"]),
    data=st.data(),
)
def test_pieces_do_not_matter(texts: list[str], inside: bool, tools: str | None, data: st.DataObject) -> None:
    text = "".join(texts)
    whole = join_parts(parse([text], tools=tools, inside=inside))
    pieces = cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    assert join_parts(parse(pieces, tools=tools, inside=inside)) == whole
    assert join_parts(parse(text, tools=tools, inside=inside)) == whole
    if tools is None:
        assert whole == _split(text, inside)


def _split(text: str, inside: bool) -> list[Part]:
    """The same for a whole text."""
    opened = re.match(r"\s*<think>", text)
    if not inside and not opened:
        return [T(text)] if text else []
    before, _, after = re.sub(r"\A(\s*<think>)*\s*", "", text).partition("</think>")
    parts: list[Part] = [R(before), T(after.lstrip())]
    return [part for part in parts if not isinstance(part, ToolCallPart) and part.text]


def test_formats_are_found_by_the_template() -> None:
    assert detect_reasoning("{{ '<think>\\n' }}") == detect_reasoning({"default": "</think>"}) == "think"
    assert detect_reasoning("[THINK]") == "mistral"
    assert detect_reasoning("plain") is detect_reasoning(None) is detect_reasoning({}) is None
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", "think")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "think")
    assert not opens_reasoning("<think>", None)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one of think, mistral, not 'deep'"):
        AnswerParser("deep")
    with pytest.raises(InvalidRequestError, match="one of hermes"):
        AnswerParser("think", "xml")
    with pytest.raises(InvalidRequestError, match="one of hermes"):
        markers(None, "xml")


# --- marks that are special tokens -----------------------------------------------------------------------------------


def test_marks_that_are_special_tokens_reach_the_parser() -> None:
    names = [*markers("think", "hermes"), "<|im_end|>", "<｜mark▁of▁blanks｜>"]
    backend = byte_level([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = TextTokenizer(wrap(backend, eos_token="<|im_end|>"))
    ids = tokenizer.encode("<think>é</think>" + CALL + "ok<|im_end|>")
    assert joined(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)
    assert "<tool_call>" not in tokenizer.decode(ids)
    keep = tokenizer.ids_of_special([*markers("think", "hermes"), "[TOOL_CALLS]"])
    assert len(keep) == 4
    text = joined(tokenizer.detokenizer(keep), ids)
    assert text == "<think>é</think>" + CALL + "ok"
    assert join_parts(parse([text], tools="hermes")) == [R("é"), *CALLED, T("ok")]
    assert joined(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)  # the others are as before


def test_tokens_that_have_text_anyway_need_not_be_kept() -> None:
    backend = byte_level([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer = TextTokenizer(wrap(backend))
    assert tokenizer.ids_of_special(["<tool_call>"]) == frozenset()
    ids = tokenizer.encode("a<tool_call>b")
    assert len(ids) == 3 and joined(tokenizer.detokenizer(frozenset(ids)), ids) == "a<tool_call>b"


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "metaspace always", "wordpiece", "none"])
@given(data=st.data())
def test_kept_tokens_stand_in_the_text_that_decode_gives(kind: str, data: st.DataObject) -> None:
    tokenizer = _with_specials(kind)
    special = frozenset(tokenizer.special_tokens.values())
    keep = frozenset(data.draw(st.sets(st.sampled_from(sorted(special)))))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2) | st.sampled_from(sorted(special)), max_size=16))
    shown = [i for i in ids if i in keep or i not in special]
    expected = tokenizer.hf.backend_tokenizer.decode(shown, skip_special_tokens=False)
    assert joined(tokenizer.detokenizer(keep), ids) == expected


_TOKENIZERS: dict[str, TextTokenizer] = {}


def _with_specials(kind: str) -> TextTokenizer:
    if kind not in _TOKENIZERS:
        backend = tiny(kind)
        backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<think>", "[ARGS]")])
        _TOKENIZERS[kind] = TextTokenizer(wrap(backend))
    return _TOKENIZERS[kind]


def test_a_tokenizer_in_python_keeps_tokens_too() -> None:
    tokenizer = TextTokenizer(CharacterTokenizer())
    keep = tokenizer.ids_of_special(["<eos>"])
    ids = [*tokenizer.encode("ab"), *keep, *tokenizer.encode("é"), 10**6]
    assert len(keep) == 1
    assert joined(tokenizer.detokenizer(keep), ids) == "ab<eos>é"
    assert joined(tokenizer.detokenizer(), ids) == "abé"


def test_tables_of_kept_tokens_are_shared_and_few() -> None:
    tokenizer = tokenizer_of("smollm2")
    special = sorted(tokenizer.special_tokens.values())
    assert len(special) > 8
    for i in range(60):
        keep = frozenset(special[j] for j in range(6) if i >> j & 1)
        assert joined(tokenizer.detokenizer(keep), special[:6]) == "".join(
            name
            for name, token_id in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
            if token_id in keep
        )
    assert 0 < len(tokenizer._keeping) <= 16
