"""Grammars without a model: whatever the masks allow is what was asked for."""

from __future__ import annotations

import gc
import json
import random
import re
import subprocess
import sys
import threading
import weakref
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest

from cbengine.errors import InvalidRequestError, RequestFailedError, UnsupportedFeatureError
from cbengine.text.structured import MaskFiller, StructuredSpec, compile_grammar, prepare_tokenizer
from cbengine.text.tokenize import TextTokenizer
from tests.project.source import ROOT
from tests.text.grammars import WIDTH, allowed, compiled, ids_of, walk
from tests.text.tokenizers import CharacterTokenizer, byte_level, tiny, tokenizer_of, wrap

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"roles": {"type": "array", "items": {"enum": ["räuber", "法官", 'a "b"', 7, None]}}},
                "required": ["roles"],
                "additionalProperties": False,
            },
            "where": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
            "why": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
        },
        "required": ["who", "where", "why"],
        "additionalProperties": False,
    },
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "strings": {"type": "array", "items": {"type": "string", "pattern": "^[à-ÿ日-末]{1,3}$"}, "maxItems": 3},
}


@pytest.mark.parametrize(("name", "seeds"), [("smollm2", 12), ("gemma3", 4)])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_random_answers_are_valid_under_the_schema(name: str, seeds: int, schema: str) -> None:
    complete = 0
    for seed in range(seeds):
        answer = walk(name, StructuredSpec(json_schema=SCHEMAS[schema]), seed)
        if answer.complete:
            jsonschema.validate(json.loads(answer.text), SCHEMAS[schema])
            complete += 1
        else:
            assert answer.text.startswith(("{", "["))
    assert complete > seeds // 2


@pytest.mark.parametrize(("name", "seeds"), [("smollm2", 12), ("gemma3", 5)])
def test_random_answers_match_whatever_was_asked_for(name: str, seeds: int) -> None:
    pattern = r"(?:[a-cé日]{2,4}-)+\d+(?:\.[0-9]{2})?"
    choice = ["yes", "no", "yes and no", 'é"\\\n', "👩‍👩", "<|im_end|>", "<end_of_turn>"]
    sums = 'start: sum\nsum: NUMBER | "(" sum ("+" | "*") sum ")"\nNUMBER: /[1-9][0-9]{0,2}/'
    seen = set()
    for seed in range(seeds):
        answer = walk(name, StructuredSpec(regex=pattern), seed)
        assert not answer.complete or re.fullmatch(pattern, answer.text)
        answer = walk(name, StructuredSpec(choice=choice), seed)
        assert answer.complete and answer.text in choice
        seen.add(answer.text)
        answer = walk(name, StructuredSpec(grammar=sums), seed)
        assert not answer.complete or eval(answer.text) > 0
        answer = walk(name, StructuredSpec(json_object=True), seed)
        assert not answer.complete or isinstance(json.loads(answer.text), dict)
    assert len(seen) >= 3


def test_an_answer_that_is_cut_off_can_be_completed() -> None:
    schema = SCHEMAS["nested"]
    for seed in range(10):
        text = walk("smollm2", StructuredSpec(json_schema=schema), seed, limit=8).text
        grammar = compiled("smollm2", StructuredSpec(json_schema=schema))
        state = grammar.start()
        for token_id in tokenizer_of("smollm2").encode(text, add_special_tokens=False):
            state.accept(token_id)  # the tokenizer's own way to write it is fine too
        assert state.finished or allowed(state, grammar)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_what_is_allowed_is_accepted_and_nothing_else(name: str) -> None:
    # Without `no_forcing`, of all tokens that fit only the tokenizer's own choice would be allowed.
    lark = '%llguidance {"no_forcing": true}\nstart: "(" WORD ")" /[!é]+/?\nWORD: /[a-z]{3}|日+/'
    grammar, rng = compiled(name, StructuredSpec(grammar=lark)), random.Random(1)
    width, eos = WIDTH[name], tokenizer_of(name).eos_token_id
    path: list[int] = []
    while True:
        here = _after(grammar, path)
        fits = allowed(here, grammar)
        for token_id in rng.sample(fits, min(len(fits), 20)):
            _after(grammar, path).accept(token_id)
        for token_id in [*rng.sample(range(width), 100), *range(width - 70, width), width, width + 40, -1]:
            if token_id not in fits:
                with pytest.raises(RequestFailedError, match="not allowed"):
                    here.accept(token_id)
        assert allowed(here, grammar) == fits  # a refusal changes nothing
        if path and rng.random() < 0.3 and eos in fits:
            break
        path.append(rng.choice([i for i in fits if i != eos]))
        if _after(grammar, path).finished:
            break


def _after(grammar: Any, path: list[int]) -> Any:
    state = grammar.start()
    for token_id in path:
        state.accept(token_id)
    return state


def test_the_end_of_a_grammar() -> None:
    tokenizer = tokenizer_of("smollm2")
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    grammar = compile_grammar(StructuredSpec(choice=["a", "ab"]), tokenizer, 49152, eos_token_ids=[2, 0, 10**6])
    state = grammar.start()
    assert not state.may_end and not state.finished
    state.accept(a)
    assert state.may_end and not state.finished
    assert {0, 2, b} == set(allowed(state, grammar))
    state.accept(b)
    assert state.finished and state.may_end and state.error is None
    assert allowed(state, grammar) == [0, 2]
    with pytest.raises(RequestFailedError):
        state.accept(a)
    state.accept(2)
    assert state.finished

    state = grammar.start()
    with pytest.raises(RequestFailedError):
        state.accept(2)
    state.accept(a)
    state.accept(0)
    assert state.finished


def test_properties_keep_their_order_and_layout_is_possible() -> None:
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"]}
    schema["additionalProperties"] = False
    compact = dict(schema) | {"x-guidance": {"whitespace_flexible": False}}
    tokenizer = tokenizer_of("smollm2")

    def fits(schema: dict[str, Any], text: str) -> bool:
        state = compiled("smollm2", StructuredSpec(json_schema=schema)).start()
        try:
            for token_id in tokenizer.encode(text):
                state.accept(token_id)
        except RequestFailedError:
            return False
        return state.finished

    assert fits(schema, '{"z":1,"a":2}') and fits(schema, '{"z": 1, "a": 2}')
    assert fits(schema, '{\n  "z": 1,\n  "a": 2\n}') and fits(schema, '{\r\n\t"z": 1,\r\n\t"a": 2\r\n}')
    assert not fits(schema, '{"a":2,"z":1}') and not fits(schema, '{\n\n"z":1,"a":2}') and not fits(schema, '{  "z":1}')
    assert fits(compact, '{"z":1,"a":2}') and not fits(compact, '{"z": 1, "a": 2}')


def test_a_logits_narrower_than_the_tokenizer() -> None:
    spec = StructuredSpec(regex="[a-z ]{1,40}")
    grammar = compile_grammar(spec, tokenizer_of("smollm2"), 1000)
    assert grammar.words == 32
    ids = allowed(grammar.start(), grammar)
    assert len(ids) > 30 and max(ids) < 1000
    every = compile_grammar(spec, tokenizer_of("smollm2"), 49152)
    assert ids == [i for i in allowed(every.start(), every) if i < 1000]


# --- specs -----------------------------------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    tags: list[int] = []


def test_a_schema_in_each_form_is_the_same() -> None:
    schema = Person.model_json_schema()
    specs = [StructuredSpec(json_schema=form) for form in (Person, schema, json.dumps(schema))]
    assert len(set(specs)) == 1 and specs[0].kind == "json_schema"
    assert len({id(compiled("smollm2", spec)) for spec in specs}) == 1
    for seed in range(5):
        answer = walk("smollm2", specs[0], seed)
        assert not answer.complete or Person.model_validate_json(answer.text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing: give exactly one"),
        ({"json_object": True, "regex": "a"}, "json_object and regex: give exactly one"),
        ({"json_object": 1}, "True or False"),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object, not list"),
        ({"json_schema": True}, "must be a JSON object, not bool"),
        ({"json_schema": int}, "no pydantic model"),
        ({"json_schema": {"const": object()}}, "cannot be written as JSON"),
        ({"json_schema": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "must be a str"),
        ({"grammar": ["start"]}, "must be a str"),
        ({"choice": []}, "at least one"),
        ({"choice": "abc"}, "list of strings"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": ["a", 1]}, "must be a str"),
    ],
)
def test_a_spec_says_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredSpec(**fields)


def test_a_model_class_without_a_schema_is_refused() -> None:
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        lock: threading.Event

    with pytest.raises(InvalidRequestError, match="Odd has no JSON schema"):
        StructuredSpec(json_schema=Odd)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "strng"}}, "Invalid type"),
    ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, "minimum"),
    ({"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
    ({"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "required property 'a'"),
    ({"json_schema": {"enum": []}}, "empty"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json_schema": {"$ref": "https://example.org/other"}}, "not present"),
    ({"json_schema": {"$ref": "#"}}, "contains itself"),
    ({"json_schema": {"type": "string", "pattern": "\ud800"}}, "not JSON"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"regex": "[a-z"}, "regex parse error"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: b"}, "unknown name"),
    ({"grammar": "begin: /b/"}, "start"),
]


@pytest.mark.parametrize(("fields", "reason"), IMPOSSIBLE)
def test_what_cannot_be_fulfilled_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    spec = StructuredSpec(**fields)
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(InvalidRequestError, match=rf"^the {spec.kind} of structured output .*: (?s:.*){reason}"):
            compiled("smollm2", spec)


def _required(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"]}


ENDLESS: list[dict[str, Any]] = [
    _required({"$ref": "#"}),
    {"$ref": "#/$defs/x", "$defs": {"x": _required({"$ref": "#/$defs/y"}), "y": _required({"$ref": "#/$defs/x"})}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    _required({"anyOf": [{"$ref": "#"}, _required({"$ref": "#"})]}),
    _required({"allOf": [{"type": "object"}, {"$ref": "#"}]}),
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_that_no_finite_text_fulfils_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="contains itself"):
        compiled("smollm2", StructuredSpec(json_schema=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        _required({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": _required({"$ref": "#/$defs/c"}), "c": {"type": "null"}}},
    ],
)
def test_a_schema_that_contains_itself_and_can_end_is_fine(schema: dict[str, Any]) -> None:
    assert compiled("smollm2", StructuredSpec(json_schema=schema)).start().error is None


# --- compiling and filling -------------------------------------------------------------------------------------------


def test_equal_specs_are_compiled_once_even_at_the_same_time() -> None:
    spec = StructuredSpec(regex="only[0-9]once")
    start, made = threading.Barrier(8), []

    def compile() -> None:
        start.wait()
        made.append(compiled("smollm2", spec))

    threads = [threading.Thread(target=compile) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len(set(map(id, made))) == 1
    assert compiled("smollm2", StructuredSpec(regex="only[0-9]twice")) is not made[0]


def test_the_oldest_grammars_are_forgotten() -> None:
    tokenizer = TextTokenizer(wrap(byte_level(), eos_token="<e>"))
    first = StructuredSpec(regex="a")
    grammar = compile_grammar(first, tokenizer, 300)
    for i in range(127):
        compile_grammar(StructuredSpec(regex=f"b{i}"), tokenizer, 300)
    assert compile_grammar(first, tokenizer, 300) is grammar
    for i in range(128):
        compile_grammar(StructuredSpec(regex=f"c{i}"), tokenizer, 300)
    assert compile_grammar(first, tokenizer, 300) is not grammar


def test_a_tokenizer_is_not_kept_alive() -> None:
    tokenizer = TextTokenizer(wrap(byte_level(), eos_token="<e>"))
    assert prepare_tokenizer(tokenizer, 300) is prepare_tokenizer(tokenizer, 300)
    grammar = compile_grammar(StructuredSpec(choice=["long enough to be forced"]), tokenizer, 300)
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None
    state, text = grammar.start(), b""
    while not state.finished:  # without it, the longest tokens are taken
        (token_id,) = allowed(state, grammar)
        state.accept(token_id)
        text += b"."
    assert len(text) == len("long enough to be forced")


def test_many_masks_at_a_time_are_those_of_one_at_a_time() -> None:
    specs = [StructuredSpec(json_schema=schema) for schema in SCHEMAS.values()] + [StructuredSpec(regex="[0-9]+x")]
    rng, filler = random.Random(3), MaskFiller(threads=2)
    grammars = [compiled("smollm2", spec) for spec in specs for _ in range(2)]
    states = [grammar.start() for grammar in grammars]
    words = grammars[0].words
    for _ in range(6):
        out = np.full((len(states) + 1, words), 7, np.int32)
        rows = list(zip(rng.sample(range(len(states)), len(states)), states, strict=True))
        assert filler.fill(rows, out) == []
        assert (out[-1] == 7).all()
        for row, state in rows:
            one = np.zeros(words, np.int32)
            state.fill_mask(one)
            assert (one == out[row]).all()
            single = np.zeros((1, words), np.int32)
            assert filler.fill([(0, state)], single) == [] and (single[0] == one).all()
            if not state.finished:
                state.accept(rng.choice([i for i in ids_of(one) if i != 2]))
    assert filler.fill([], np.zeros((1, words), np.int32)) == []


def test_answers_of_one_grammar_do_not_disturb_each_other() -> None:
    spec = StructuredSpec(json_schema=SCHEMAS["nested"])
    alone = [walk("smollm2", spec, seed) for seed in range(3)]
    grammar = compiled("smollm2", spec)
    states = [grammar.start() for _ in alone]
    for step in range(max(len(answer.ids) for answer in alone)):
        for state, answer in zip(states, alone, strict=True):
            if step < len(answer.ids):
                assert answer.ids[step] in allowed(state, grammar)
                state.accept(answer.ids[step])
    assert [state.finished for state in states] == [answer.complete for answer in alone]


def test_a_grammar_beyond_the_librarys_limits_fails_alone_and_is_made_anew() -> None:
    # Whether a character some way back was this or that: the lexer needs a state for each of the many pasts.
    spec = StructuredSpec(regex="(.*a.{60}b|.*b.{50}c|.*c.{40}a)z")
    grammar, other = compiled("smollm2", spec), compiled("smollm2", StructuredSpec(regex="[a-z]+"))
    state, fine, filler, rng = grammar.start(), other.start(), MaskFiller(), random.Random(0)
    letters = [tokenizer_of("smollm2").encode(letter)[0] for letter in "abc"]
    out = np.zeros((2, grammar.words), np.int32)
    failed = filler.fill([(0, state), (1, fine)], out)
    while not failed:
        token_id = rng.choice(letters)
        state.accept(token_id)
        fine.accept(token_id)
        failed = filler.fill([(0, state), (1, fine)], out)
    assert [row for row, _ in failed] == [0]
    assert "cannot go on" in str(failed[0][1])
    assert ids_of(out[0]) == [2] and len(ids_of(out[1])) > 1000
    assert not state.finished and isinstance(state.error, RequestFailedError)
    with pytest.raises(RequestFailedError, match="cannot go on"):
        state.accept(letters[0])
    with pytest.raises(RequestFailedError, match="cannot go on"):
        state.fill_mask(out[0])
    again = compiled("smollm2", spec)
    assert grammar.spent and again is not grammar and allowed(again.start(), again)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_sentencepiece_tokenizer_that_puts_a_blank_in_front() -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "</s>", "▁", "▁yes", "yes", "no", "n", "o", "y", "e", "s", "▁no", "<0x21>"]
    backend = Tokenizer(models.Unigram([(piece, -1.0 - i / 8) for i, piece in enumerate(pieces)], 0, True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = TextTokenizer(wrap(backend, eos_token="</s>", unk_token="<unk>"))
    grammar = compile_grammar(StructuredSpec(choice=["yes no!"]), tokenizer, 16)
    state, ids = grammar.start(), []
    while not state.finished:
        ids.append(allowed(state, grammar)[-1])
        state.accept(ids[-1])
    assert tokenizer.decode(ids) == "yes no!"


def test_special_tokens_stand_in_grammars_by_their_names() -> None:
    tokenizer = tokenizer_of("smollm2")
    grammar = compiled("smollm2", StructuredSpec(grammar='start: "a" <|im_start|> "b"'))
    state = grammar.start()
    for token_id in (*tokenizer.encode("a"), tokenizer.special_tokens["<|im_start|>"], *tokenizer.encode("b")):
        state.accept(token_id)
    assert state.finished


def test_tokenizers_without_a_table_or_an_end_are_refused() -> None:
    spec = StructuredSpec(regex="a")
    for hf in (wrap(tiny("wordpiece"), eos_token="<s>"), CharacterTokenizer()):
        with pytest.raises(UnsupportedFeatureError, match="structured output is not supported for this model"):
            compile_grammar(spec, TextTokenizer(hf), 64)
    with pytest.raises(UnsupportedFeatureError, match="end-of-sequence"):
        compile_grammar(spec, TextTokenizer(wrap(byte_level())), 256)


def test_the_library_is_asked_for_only_when_it_is_needed() -> None:
    script = """
import sys
sys.modules["llguidance"] = None
from cbengine.errors import UnsupportedFeatureError
from cbengine.text.structured import StructuredSpec, compile_grammar
from cbengine.text.tokenize import TextTokenizer
from tests.text.tokenizers import byte_level, wrap
spec = StructuredSpec(choice=["a"])
try:
    compile_grammar(spec, TextTokenizer(wrap(byte_level(), eos_token="<e>")), 300)
except UnsupportedFeatureError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert "pip install 'cbengine[structured]'" in done.stdout
