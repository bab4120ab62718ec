"""Which detokenizer a decoder gets, and that each one keeps the law."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from cbengine.text import decoders as ours
from cbengine.text.decoders import Factory, detokenizer_factory
from cbengine.text.detokenize import ByteDetokenizer, PieceDetokenizer, TokenTable, WindowDetokenizer
from tests.text.tokenizers import (
    DECODERS,
    PATIENT_DECODERS,
    TABLE_DECODERS,
    WINDOW_DECODERS,
    byte_level,
    joined,
    tiny,
    with_added_tokens,
    word_level,
)

_MADE: dict[str, tuple[Tokenizer, Factory]] = {}


def made(kind: str) -> tuple[Tokenizer, Factory]:
    if kind not in _MADE:
        backend = with_added_tokens() if kind == "added tokens" else tiny(kind)
        _MADE[kind] = backend, detokenizer_factory(backend)
    return _MADE[kind]


def decode(backend: Tokenizer, ids: list[int]) -> str:
    return backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", [*DECODERS, "added tokens"])
@given(data=st.data())
def test_the_law(kind: str, data: st.DataObject) -> None:
    backend, make = made(kind)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=20))
    assert joined(make(), ids) == decode(backend, ids)


@pytest.mark.parametrize("kind", TABLE_DECODERS)
def test_common_decoders_have_a_table(kind: str) -> None:
    _, make = made(kind)
    assert type(make()) is (ByteDetokenizer if kind == "byte level" else PieceDetokenizer)


@pytest.mark.parametrize("kind", WINDOW_DECODERS)
def test_other_decoders_stream_too(kind: str) -> None:
    backend, make = made(kind)
    detokenizer = make()
    assert type(detokenizer) is WindowDetokenizer
    ids = [backend.token_to_id(token) for token in ["the", "low", "a", "b"] * 8]
    pieces = [detokenizer.push(token_id or 0) for token_id in ids]
    assert "".join(pieces[:-1]) and len(detokenizer.flush()) < 8


@pytest.mark.parametrize("kind", PATIENT_DECODERS)
def test_a_decoder_that_may_take_everything_back_is_waited_for(kind: str) -> None:
    backend, make = made(kind)
    detokenizer = make()
    ids = [backend.token_to_id(token) or 0 for token in ["the", "a", "b"]]
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", ""]
    assert detokenizer.flush() == decode(backend, ids) == "theX"


def test_the_window_does_not_grow() -> None:
    backend, make = made("wordpiece")
    detokenizer = make()
    assert isinstance(detokenizer, WindowDetokenizer)
    the = backend.token_to_id("the") or 0
    assert [detokenizer.push(the) for _ in range(100)] == ["the"] + [" the"] * 99
    assert len(detokenizer._ids) - detokenizer._start <= WindowDetokenizer.CONTEXT + 1


def test_blanks_at_the_start_of_an_answer() -> None:
    expected = {"llama": "the the", "gemma": " the the", "metaspace always": "the the", "metaspace never": " the the"}
    for kind, text in expected.items():
        backend, make = made(kind)
        ids = [backend.token_to_id(token) or 0 for token in ("<s>", "▁the", "▁the")]
        assert joined(make(), ids) == decode(backend, ids) == text


def test_a_decoder_in_python() -> None:
    class Shout:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return [token.upper() for token in tokens]

    class Reverse:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return tokens[::-1]

    for custom, streams in ((Shout(), True), (Reverse(), False)):
        backend = word_level(["x", "y", "z"], decoders.Decoder.custom(custom))
        detokenizer = detokenizer_factory(backend)()
        assert isinstance(detokenizer, WindowDetokenizer)
        pieces = [detokenizer.push(token_id) for token_id in (0, 1, 2)]
        assert any(pieces) is streams
        assert "".join(pieces) + detokenizer.flush() == decode(backend, [0, 1, 2])


@pytest.mark.parametrize("wrong", ["byte_level", "piece"])
def test_a_table_that_disagrees_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = getattr(ours, f"_{wrong}_table")

    def spoiled(*arguments: Any) -> TokenTable:
        table = build(*arguments)
        table.texts[:] = [text and text + "?" for text in table.texts]
        return table

    monkeypatch.setattr(ours, f"_{wrong}_table", spoiled)
    backend = byte_level() if wrong == "byte_level" else tiny("gemma")
    detokenizer = detokenizer_factory(backend)()
    assert type(detokenizer) is WindowDetokenizer
    assert joined(detokenizer, range(20)) == decode(backend, list(range(20)))


def test_added_tokens_are_treated_as_the_backend_does() -> None:
    backend, make = made("added tokens")
    assert type(make()) is ByteDetokenizer
    for token_id in range(256, backend.get_vocab_size()):
        for ids in ([token_id], [0, token_id, 1], [200, token_id, 130]):
            assert joined(make(), ids) == decode(backend, ids)
    ids = [backend.token_to_id(token) or 0 for token in ("<|end|>", "<Tool Call>", "日本")]
    assert joined(make(), ids) == "<Tool Call>日本"


def test_a_vocabulary_with_gaps() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7, "c": 4000}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken("<s>", special=True)])
    make = detokenizer_factory(backend)
    ids = [0, 3, 7, 8, 4000, 4001, 5000, backend.token_to_id("<s>") or 0, 7]
    assert joined(make(), ids) == decode(backend, ids) == "abcb"
