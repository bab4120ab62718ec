"""Encoding from any thread, decoding, and what a tokenizer's own state must not change."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cbengine.errors import InvalidRequestError
from cbengine.text.detokenize import WindowDetokenizer
from cbengine.text.tokenize import TextTokenizer
from tests.support.models import model_folder
from tests.text.tokenizers import CharacterTokenizer, byte_level, joined, real, tokenizer_of, wrap

NAMES = ["smollm2", "gemma3"]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "x  =  5\n\n1. foo",
    "日本語 👩‍👩‍👧‍👦 cafe\u0301",
    "<|im_start|>user<bos>",
    "a" * 500,
]


@pytest.fixture
def own() -> Any:
    """A transformers tokenizer that the test may change."""
    return AutoTokenizer.from_pretrained(model_folder("smollm2"))


@pytest.fixture
def transformers_log() -> Iterator[list[logging.LogRecord]]:
    """What transformers logs during the test; its loggers do not reach pytest's own handler."""
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Handler()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_transformers(name: str, special: bool) -> None:
    tokenizer = tokenizer_of(name)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=special) == real(name).encode(text, add_special_tokens=special)


@given(st.lists(st.integers(0, 49300), max_size=30))
def test_decode_equals_transformers(ids: list[int]) -> None:
    expected = real("smollm2").decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer_of("smollm2").decode(ids) == tokenizer_of("smollm2").decode(tuple(ids)) == expected


def test_facts() -> None:
    smollm2, gemma3 = tokenizer_of("smollm2"), tokenizer_of("gemma3")
    assert (smollm2.vocab_size, smollm2.eos_token_id, smollm2.has_chat_template) == (49152, 2, True)
    assert (gemma3.vocab_size, gemma3.eos_token_id, gemma3.has_chat_template) == (262144, 1, False)
    assert smollm2.hf is real("smollm2")


def test_added_tokens_count(own: Any) -> None:
    own.add_tokens(["<mine>"])
    tokenizer = TextTokenizer(own)
    assert tokenizer.vocab_size == 49153
    assert tokenizer.encode("a<mine>b") == [81, 49152, 82]
    assert tokenizer.decode([81, 49152, 82]) == "a<mine>b"


def test_long_texts_are_neither_cut_nor_warned_about(own: Any, transformers_log: list[logging.LogRecord]) -> None:
    own.model_max_length = 8
    tokenizer = TextTokenizer(own)
    assert len(tokenizer.encode("one two three" + " one two three" * 99)) == 300
    assert len(TextTokenizer(CharacterTokenizer(model_max_length=8)).encode("abc" * 100)) == 300
    assert transformers_log == []


def test_truncation_and_padding_of_the_given_tokenizer_do_not_matter(own: Any) -> None:
    expected = own.encode("one two three four")
    own.backend_tokenizer.enable_truncation(2)
    own.backend_tokenizer.enable_padding(length=64)
    tokenizer = TextTokenizer(own)
    assert tokenizer.encode("one two three four") == expected
    own("one two", truncation=True, max_length=1, padding="max_length")
    own.add_tokens(["three"])
    assert tokenizer.encode("one two three four") == expected


def test_many_threads_encode_while_the_given_tokenizer_is_in_use(own: Any) -> None:
    texts = [f"{word} number {i} " * (1 + i % 40) for i in range(60) for word in ("emoji 👩‍👩‍👧‍👦", "日本語", "plain")]
    expected = own(texts)["input_ids"]
    tokenizer = TextTokenizer(own)
    done = threading.Event()

    def disturb() -> None:
        while not done.is_set():
            own.backend_tokenizer.enable_truncation(3)
            own.backend_tokenizer.no_truncation()
            own.backend_tokenizer.enable_padding(length=7)
            own.backend_tokenizer.no_padding()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                assert list(pool.map(tokenizer.encode, texts)) == expected
    finally:
        done.set()
        disturber.join()


def test_encoding_lets_other_threads_run() -> None:
    """A long text is encoded without the GIL. Nothing else hands it over here: the switch interval is out of reach."""
    tokenizer = tokenizer_of("smollm2")
    text = "The quick brown fox jumps over 12 lazy dogs. " * 20_000
    steps: list[int] = [0]
    seen: list[int] = []

    def work() -> None:
        seen.append(steps[0])
        tokenizer.encode(text)
        seen.append(steps[0])

    worker = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker.start()
        while worker.is_alive():
            steps[0] += 1
            time.sleep(0)  # hands the GIL over
    finally:
        sys.setswitchinterval(interval)
        worker.join()
    assert seen[1] > seen[0]


@pytest.mark.parametrize("bad", [None, 3, b"bytes", ["list"]])
def test_only_str_can_be_encoded(bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a str"):
        tokenizer_of("smollm2").encode(bad)


def test_half_a_utf16_character_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate.*position 1"):
        tokenizer_of("smollm2").encode("a\ud83d")


def test_added_tokens_that_cannot_be_copied() -> None:
    """In a vocabulary with gaps the id of an added token depends on when it was added."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    source = wrap(backend)
    for token in ("<one>", "b", "<two>"):
        source.add_tokens([AddedToken(token, special=token == "<one>")])
    assert source.convert_tokens_to_ids(["<one>", "b", "<two>"]) == [2, 7, 8]
    source.backend_tokenizer.enable_truncation(1)
    tokenizer = TextTokenizer(source)
    with ThreadPoolExecutor(8) as pool:
        for ids in pool.map(tokenizer.encode, ["<one>a<two>b"] * 100):
            assert ids == [2, 0, 8, 7]
    assert tokenizer.decode([2, 0, 8, 7, 99]) == "a<two>b"
    assert joined(tokenizer.detokenizer(), [2, 0, 8, 3, 7, 99]) == "a<two>b"


def test_special_tokens_may_be_split() -> None:
    tokenizer = wrap(byte_level([AddedToken("<end>", special=True)]), split_special_tokens=True)
    assert TextTokenizer(tokenizer).encode("<end>") == tokenizer.encode("<end>") != [256]


def test_a_tokenizer_in_python() -> None:
    tokenizer = TextTokenizer(CharacterTokenizer())
    ids = tokenizer.encode("abé日👩. ?")
    assert ids == [0, 1, 5, 6, 7, 4, 3, 9]
    assert tokenizer.decode([*ids, 11, 12, 999]) == "abé日👩. "
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token_id) for token_id in [*ids, 10, 999]] == [*"abé日👩. ", "", "", ""]
    assert detokenizer.flush() == ""


CHARACTERS = TextTokenizer(CharacterTokenizer())


@given(st.lists(st.integers(0, 14), max_size=20))
def test_the_law_for_a_tokenizer_in_python(ids: list[int]) -> None:
    tokenizer = CHARACTERS
    assert joined(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


def test_a_class_with_its_own_decode_is_asked() -> None:
    class Underlined(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> Any:
            return super()._decode(*args, **kwargs).replace("_", " ")

    backend = Tokenizer(models.WordLevel({"a": 0, "_b": 1, "_": 2}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    tokenizer = TextTokenizer(Underlined(tokenizer_object=backend))
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    assert [detokenizer.push(token_id) for token_id in (0, 1, 2, 77)] == ["a", " b", " ", ""]
    assert tokenizer.decode([0, 1, 2, 77]) == "a b "


def test_a_class_with_its_own_encode_is_asked() -> None:
    class Reversed(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(text[::-1], *args, **kwargs)

    tokenizer = TextTokenizer(Reversed(tokenizer_object=byte_level()))
    with ThreadPoolExecutor(4) as pool:
        texts = [f"text {i}" for i in range(100)]
        assert [tokenizer.decode(ids) for ids in pool.map(tokenizer.encode, texts)] == [text[::-1] for text in texts]
