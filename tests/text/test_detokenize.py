"""The law of incremental detokenization on the real tokenizers: the joined texts equal the full decode."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cbengine.text.detokenize import ByteDetokenizer, PieceDetokenizer
from cbengine.text.tokenize import TextTokenizer
from tests.text.tokenizers import byte_level, joined, real, tokenizer_of, wrap

NAMES = ["smollm2", "gemma3"]
KINDS = {"smollm2": ByteDetokenizer, "gemma3": PieceDetokenizer}
TEXTS = [
    "Hello, world!",
    "  two blanks first\n\n\tand a tab ",
    "naïve café, cafe\u0301, Z\u0351\u036b\u0343a\u0323\u0302lgo",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵",
    "日本語、中文，한국어 𠮷野家",
    "नमस्ते สวัสดี ဗမာ",
    "𒀀𒁀 ᚠᛇ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \x00\x7f",
    "ﷺ\u200f\u202e mixed \u2028 lines",
]

BYTE_CHARACTERS = bytes_to_unicode()  # the character that stands for each byte in a byte-level vocabulary
_VOCABULARY = real("smollm2").get_vocab()
BYTE_IDS = {byte: _VOCABULARY.get(character) for byte, character in BYTE_CHARACTERS.items()}


def full_decode(name: str, ids: list[int]) -> str:
    """By transformers itself, not by the tokenizer under test."""
    return real(name).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ids_of(name: str, tokens: str) -> list[int]:
    ids = real(name).convert_tokens_to_ids(tokens.split())
    assert None not in ids
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_the_fast_way_is_taken(name: str) -> None:
    assert type(tokenizer_of(name).detokenizer()) is KINDS[name]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_comes_back_without_half_characters(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == full_decode(name, ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_cut_anywhere_equals_its_decode(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    for end in range(len(ids)):
        assert joined(tokenizer.detokenizer(), ids[:end]) == full_decode(name, ids[:end])


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_random_tokens(name: str, data: st.DataObject) -> None:
    size = tokenizer_of(name).vocab_size
    some = st.integers(0, size - 1) | st.integers(0, 300) | st.integers(size - 1, size + 40)
    ids = data.draw(st.lists(some, max_size=40))
    assert joined(tokenizer_of(name).detokenizer(), ids) == full_decode(name, ids)


@given(st.binary(max_size=24))
def test_random_bytes_of_a_byte_level_vocabulary(data: bytes) -> None:
    ids = [token_id for token_id in map(BYTE_IDS.get, data) if token_id is not None]
    expected = data.decode("utf-8", "replace")
    if len(ids) < len(data):  # SmolLM2 has no token for a few bytes that never occur in UTF-8
        expected = full_decode("smollm2", ids)
    assert joined(tokenizer_of("smollm2").detokenizer(), ids) == full_decode("smollm2", ids) == expected


@given(st.lists(st.integers(0, 255) | st.sampled_from(["the", "▁a", "<bos>", "é", "<unused7>"]), max_size=24))
def test_random_bytes_of_byte_fallback(draws: list[int | str]) -> None:
    names = [f"<0x{item:02X}>" if isinstance(item, int) else item for item in draws]
    ids = real("gemma3").convert_tokens_to_ids(names)
    assert joined(tokenizer_of("gemma3").detokenizer(), ids) == full_decode("gemma3", ids)


def test_the_rust_library_and_python_agree_on_invalid_utf8() -> None:
    """Every sequence of up to three bytes of each class that UTF-8 tells apart, at each end of the class."""
    ends = [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF4, 0xC1, 0xF5]
    backend = byte_level()
    make = TextTokenizer(wrap(backend)).detokenizer
    ids = [backend.token_to_id(BYTE_CHARACTERS[byte]) for byte in ends]
    sequences = [[i or 0 for i in s] for n in (1, 2, 3) for s in itertools.product(ids, repeat=n)]
    for sequence, expected in zip(sequences, backend.decode_batch(sequences), strict=True):
        assert joined(make(), sequence) == expected


def test_tokens_complete_by_themselves_come_at_once() -> None:
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        ids = tokenizer.encode("The quick brown fox, 12 lazy dogs.", add_special_tokens=False)
        detokenizer = tokenizer.detokenizer()
        assert [detokenizer.push(token_id) for token_id in ids] == [full_decode(name, [i]) for i in ids]
        assert detokenizer.flush() == ""


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("smollm2")
    ids = tokenizer.encode("\U00012000", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["\U00012000"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_at_the_end_once() -> None:
    tokenizer = tokenizer_of("smollm2")
    ids = tokenizer.encode("a\U00012000", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token_id) for token_id in ids] == ["a"] + [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_run_of_bytes_is_text_only_when_it_ends() -> None:
    tokenizer = tokenizer_of("gemma3")
    push = tokenizer.detokenizer().push
    ids = ids_of("gemma3", "the <0xE2> <0x96> <0x81> <0x41> the <0x41> <0xFF> <0x42> the")
    assert [push(token_id) for token_id in ids] == ["the", "", "", "", "", "▁Athe", "", "\ufffd\ufffd", "\ufffd", "the"]


def test_special_and_unknown_tokens_do_not_part_a_character() -> None:
    tokenizer = tokenizer_of("smollm2")
    ids = tokenizer.encode("\U00012000", add_special_tokens=False)
    ids[1:1] = [0, 2, tokenizer.vocab_size, 10**6]
    assert joined(tokenizer.detokenizer(), ids) == full_decode("smollm2", ids) == "\U00012000"
    ids = [*ids_of("gemma3", "<0xC3> <bos> <0xA9> <eos>"), 10**6]
    assert joined(tokenizer_of("gemma3").detokenizer(), ids) == full_decode("gemma3", ids) == "é"


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_have_no_text(name: str) -> None:
    detokenizer = tokenizer_of(name).detokenizer()
    assert [detokenizer.push(token_id) for token_id in real(name).all_special_ids] == [""] * len(
        real(name).all_special_ids
    )
    assert detokenizer.flush() == ""


def test_answers_do_not_share_state() -> None:
    tokenizer = tokenizer_of("smollm2")
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    ids = tokenizer.encode("\U00012000", add_special_tokens=False)
    first.push(ids[0])
    assert second.push(tokenizer.encode("a")[0]) == "a"
    assert [first.push(token_id) for token_id in ids[1:]][-1] == "\U00012000"
