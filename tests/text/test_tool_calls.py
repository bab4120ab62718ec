"""Tool calls in text: each format, whatever pieces it comes in, and what only looks like a call."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbengine.errors import InvalidRequestError
from cbengine.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, join_parts
from cbengine.text.tool_calls import PARSERS, detect_format, make_parser


def parse(format: str, pieces: Iterable[str]) -> list[Part]:
    """All parts, as they came."""
    ids = iter(range(10**6))
    parser = make_parser(format, lambda: f"id{next(ids)}")
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.flush()


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    """Name and arguments of each call; checks the shape on the way."""
    calls: list[tuple[str, str]] = []
    ids = set()
    for part in parts:
        if not isinstance(part, ToolCallPart):
            continue
        if part.name is not None:
            assert part.index == len(calls) and part.id and part.arguments_delta == ""
            calls.append((part.name, ""))
            ids.add(part.id)
        else:
            assert part.index == len(calls) - 1 and part.id is None and part.arguments_delta
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments_delta)
    assert len(ids) == len(calls)
    return calls


def cut(text: str, places: Iterable[int]) -> list[str]:
    places = [0, *sorted(place for place in places if 0 <= place <= len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


# --- well-formed answers ---------------------------------------------------------------------------------------------

plain = st.text(st.sampled_from("ab .é日👩\n-:"), min_size=1, max_size=8).map(lambda text: text + ".")
names = st.from_regex(r"[a-zA-Z_][\w.\-]{0,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab{}[]"\\é👩\n<>/;,:'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(st.sampled_from('ab}"é'), max_size=3), values, max_size=3)
layouts = st.sampled_from([None, 2])


@st.composite
def objects(draw: st.DrawFn, name: str, content: dict[str, Any], key: str, named_first: bool) -> str:
    """The JSON of a call in one of the ways in which models write it."""
    members: list[tuple[str, Any]] = [("name", name), (key, content)]
    if not named_first and draw(st.booleans()):
        members.reverse()
    if draw(st.booleans()):
        members.insert(draw(st.integers(0, 2)), ("type", "function"))
    return json.dumps(dict(members), ensure_ascii=draw(st.booleans()), indent=draw(layouts))


@st.composite
def answers(draw: st.DrawFn, format: str) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """An answer as the model writes it, its text, and its calls."""
    written, text, calls = "", "", []
    blanks = ""  # after a call: text only if more text follows
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            piece = draw(plain) + ("\n" if format == "llama3" else "")
            written, text = written + piece, text + blanks + piece
        group = [(draw(names), draw(arguments)) for _ in range(draw(st.integers(1, 2)))]
        calls += group
        blanks = draw(st.sampled_from(["", "\n", " \n\n"]))
        written += draw(GROUPS[format](group)) + blanks
    if draw(st.booleans()):
        piece = draw(plain)
        written, text = written + piece, text + blanks + piece
    return written, text, calls


Group = list[tuple[str, dict[str, Any]]]


@st.composite
def hermes(draw: st.DrawFn, group: Group) -> str:
    blank = draw(st.sampled_from(["", "\n"]))
    items = [draw(objects(name, content, "arguments", False)) for name, content in group]
    return blank.join(f"<tool_call>{blank}{item}{blank}</tool_call>" for item in items)


@st.composite
def llama(draw: st.DrawFn, group: Group) -> str:
    mark = draw(st.sampled_from(["", "<|python_tag|>"]))
    return mark + draw(st.sampled_from(["; ", ";", "\n"])).join(
        draw(objects(name, content, "parameters", False)) for name, content in group
    )


@st.composite
def mistral(draw: st.DrawFn, group: Group) -> str:
    if draw(st.booleans()):
        items = [draw(objects(name, content, "arguments", False)) for name, content in group]
        return f"[TOOL_CALLS]{draw(st.sampled_from(['', ' ']))}[{', '.join(items)}]"
    mark = draw(st.sampled_from(["[ARGS]", "[CALL_ID]abc123def[ARGS]", ""]))
    return "".join(f"[TOOL_CALLS]{name}{mark}{json.dumps(content)}" for name, content in group)


GROUPS = {"hermes": hermes, "llama3": llama, "mistral": mistral}


@pytest.mark.parametrize("format", PARSERS)
@given(data=st.data())
def test_text_and_calls_come_out_as_they_were_written(format: str, data: st.DataObject) -> None:
    written, text, calls = data.draw(answers(format))
    parts = parse(format, cut(written, data.draw(st.lists(st.integers(0, len(written)), max_size=8))))
    found = calls_of(parts) if "[CALL_ID]" not in written else _names_and_arguments(parts)
    assert [(name, json.loads(content)) for name, content in found] == calls
    assert text_of(parts) == text
    assert join_parts(parts) == join_parts(parse(format, [written]))


def _names_and_arguments(parts: list[Part]) -> list[tuple[str, str]]:
    """As `calls_of`, where the model has given two calls one id."""
    ids = iter(range(10**6))
    renamed = [
        ToolCallPart(part.index, f"{part.id}-{next(ids)}", part.name)
        if isinstance(part, ToolCallPart) and part.name is not None
        else part
        for part in parts
    ]
    return calls_of(renamed)


# --- anything at all -------------------------------------------------------------------------------------------------

FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_", "call>", "<", "</tool"],
    "llama3": ["<|python_tag|>", "<|python", "_tag|>", "<", ";", "\n{"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_", "CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "f", "[ARG"],
}
JSON_FRAGMENTS = ['{"name": "f", "', 'arguments": {', 'parameters": {', '"a": "}"', "}", "}}", "{", '"', ",", ":"]
JSON_FRAGMENTS += [" ", "\n", "\\", '"name"', '"x"', "null", "12", "[", "]", '"{}"', "é", "text", '{"id": "i", ']


@pytest.mark.parametrize("format", PARSERS)
@given(data=st.data())
def test_pieces_do_not_matter_and_nothing_is_lost(format: str, data: st.DataObject) -> None:
    fragments = st.sampled_from(FRAGMENTS[format] + JSON_FRAGMENTS)
    text = "".join(data.draw(st.lists(fragments, max_size=14)))
    whole = parse(format, [text])
    pieces = parse(format, cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=10))))
    assert join_parts(pieces) == join_parts(whole) == join_parts(parse(format, text))
    calls = calls_of(whole)
    if not calls:
        assert text_of(whole) == text
    at = 0
    for part in join_parts(whole):
        shown = part.text if isinstance(part, TextPart) else "" if isinstance(part, ReasoningPart) else part.name or ""
        assert text.find(shown, at) >= 0
        at = text.find(shown, at) + len(shown)


@pytest.mark.parametrize("format", PARSERS)
@given(text=st.text(st.sampled_from("<[{tool_cal>|pyh]TOOLCALS}\n é"), max_size=30))
def test_a_near_miss_is_text_and_only_a_possible_mark_is_held_back(format: str, text: str) -> None:
    parser = make_parser(format)
    marks = (*PARSERS[format].MARKERS[:1], *(("{",) if format == "llama3" else ()))
    shown = ""
    for i, character in enumerate(text):
        shown += text_of(parser.push(character))
        held = text[len(shown) : i + 1]
        assert held == "" or any(mark.startswith(held) for mark in marks) or held.lstrip("{ \n") == ""
    assert shown + text_of(parser.flush()) == text


# --- by example ------------------------------------------------------------------------------------------------------


def test_a_call_is_streamed_as_it_comes() -> None:
    parser = make_parser("hermes", lambda: "id")
    pieces = [
        "Let me",
        " see <tool",
        '_call>\n{"name',
        '": "weather", "argum',
        'ents": {"city": "Z',
        'ürich"',
        "}}\n",
        "</tool_call>",
    ]
    assert [parser.push(piece) for piece in pieces] == [
        [TextPart("Let me")],
        [TextPart(" see ")],
        [],
        [],
        [ToolCallPart(0, "id", "weather"), ToolCallPart(0, arguments_delta='{"city": "Z')],
        [ToolCallPart(0, arguments_delta='ürich"')],
        [ToolCallPart(0, arguments_delta="}")],
        [],
    ]
    assert parser.flush() == []


WELL_FORMED = [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', "", [("f", '{"a": "é"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}]\\"{"}, "x": [1, {}]}', "", [("f", '{"a": "}]\\"{"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.', "\n\nDone.", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_ca', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x', "", [("f", '{"a": [1, "x')]),
    ("llama3", '\n{"name": "f", "parameters": {"a": 1}}', "\n", [("f", '{"a": 1}')]),
    ("llama3", 'Sure:\n  {"type": "function", "name": "f", "parameters": {}}', "Sure:\n  ", [("f", "{}")]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
     [("f", "{}"), ("g", "{}")]),
    ("llama3", 'see <|python_tag|>{"name": "f", "parameters": {}} and so on', "see  and so on", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": []}}]', "",
     [("f", "{}"), ("g", '{"b": []}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, ', "", [("f", "{}")]),
    ("mistral", 'ok[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS] {}', "ok", [("f", '{"a": 1}'), ("g", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "written", "text", "calls"), WELL_FORMED)
def test_calls_in_all_their_shapes(format: str, written: str, text: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([written], list(written)):
        parts = parse(format, pieces)
        assert (text_of(parts), calls_of(parts)) == (text, calls)


MALFORMED = [
    ("hermes", "<tool_call>get_weather()</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", "a </tool_call> b"),
    ("hermes", '<tool_call>{"name": "' + 300 * "f" + '", "arguments": {}}</tool_call>'),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("llama3", '{"name": "Ada", "age": 36}'),
    ("llama3", '{"name": "Ada", "parameters": "none"}'),
    ("llama3", '{"name": "Ada"}'),
    ("llama3", 'Here: {"name": "f", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="{}")'),
    ("llama3", '<|python_tag|>\nprint({"name": "f", "parameters": {}})'),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]1[CALL_ID]2[ARGS]{"a": 1}'),
    ("mistral", "[TOOL_CALLS]f[ARGS]1"),
    ("mistral", "[TOOL_CALLS]f[ARG"),
    ("mistral", "[TOOL_CALLS]" + 300 * "f" + "[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]!"),
    ("mistral", '[{"name": "f", "arguments": {}}]'),
]


@pytest.mark.parametrize(("format", "text"), MALFORMED)
def test_what_is_no_call_is_text(format: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert join_parts(parse(format, pieces)) == [TextPart(text)]


def test_text_after_a_broken_call_is_searched_on() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = parse("hermes", ["<tool_call>{", call])
    assert (text_of(parts), calls_of(parts)) == ("<tool_call>{", [("f", "{}")])
    parts = parse("llama3", ['{"name": 1}\n{"name": "f", "parameters": {}}'])
    assert (text_of(parts), calls_of(parts)) == ('{"name": 1}\n', [("f", "{}")])


def test_what_breaks_after_the_arguments_have_begun_is_text() -> None:
    parts = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": 1]}}</tool_call> tail'])
    assert (text_of(parts), calls_of(parts)) == ("]}}</tool_call> tail", [("f", '{"a": 1')])
    parts = parse("mistral", ['[TOOL_CALLS][{"name": "f", "arguments": {}} , 7]'])
    assert (text_of(parts), calls_of(parts)) == (" , 7]", [("f", "{}")])
    parts = parse("llama3", ['{"name": "f", "parameters": {}}; {"no"}'])
    assert (text_of(parts), calls_of(parts)) == ('; {"no"}', [("f", "{}")])


def test_ids() -> None:
    def first_id(format: str, text: str) -> str | None:
        part = make_parser(format).push(text)[0]
        assert isinstance(part, ToolCallPart)
        return part.id

    assert re.fullmatch(r"call_[0-9a-f]{24}", first_id("hermes", '<tool_call>{"name": "f", "arguments": {') or "")
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", first_id("mistral", "[TOOL_CALLS]f[ARGS]{") or "")
    assert first_id("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{") == "abcdefghi"
    assert first_id("hermes", '<tool_call>{"id": "mine", "name": "f", "arguments": {') == "mine"


def test_formats_are_found_by_the_template_or_the_name() -> None:
    qwen = "{%- if tools %}...within <tool_call></tool_call> XML tags{% endif %}"
    coder = qwen + "<tool_call>\n<function=example_function_name>"
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert detect_format(qwen) == detect_format({"default": "", "tool_use": qwen}) == "hermes"
    assert detect_format(coder, "Qwen3-Coder-30B") is None
    assert detect_format(llama) == detect_format('{{- "<|python_tag|>" }}') == "llama3"
    assert detect_format("{{ '[TOOL_CALLS] ' }}") == "mistral"
    assert detect_format("{{ messages }}", "Qwen/Qwen3-8B") is None
    found = {
        "Qwen/Qwen2.5-7B-Instruct": "hermes", "Qwen/Qwen3-8B": "hermes", "Qwen3-Coder-30B-A3B": None,
        "NousResearch/Hermes-3-Llama-3.1-8B": "hermes", "meta-llama/Llama-3.1-8B-Instruct": "llama3",
        "meta-llama/Llama-2-7b": None, "mistralai/Mistral-7B-Instruct-v0.3": "mistral", "Ministral-8B": "mistral",
        "SmolLM2-135M-Instruct": None, "": None,
    }  # fmt: skip
    assert {name: detect_format(None, name) for name in found} == found


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one of hermes, llama3, mistral, not 'xml'"):
        make_parser("xml")
