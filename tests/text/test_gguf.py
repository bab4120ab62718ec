"""The tokenizer that transformers makes from a GGUF file, put right."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from cbengine.errors import InvalidRequestError
from cbengine.text.gguf import read_gguf_string
from cbengine.text.tokenize import TextTokenizer, fix_gguf_tokenizer
from tests.support.models import model_folder
from tests.text.tokenizers import byte_level, tokenizer_of, wrap

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
KEY = "tokenizer.ggml.pre"


@pytest.fixture(scope="module")
def broken() -> Any:
    folder = model_folder("smollm2").parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def write(path: Path, pre: str | None) -> Path:
    """A small GGUF file with values of every kind before the key."""
    writer = GGUFWriter(path, "llama")
    writer.add_bool("a.bool", True)
    writer.add_float64("a.float", 0.5)
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.nested", [[1, 2], [3]])
    if pre is not None:
        writer.add_string(KEY, pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_blanks_before_digits(broken: Any) -> None:
    path = model_folder("smollm2").parent / GGUF
    assert fix_gguf_tokenizer(broken, path)
    assert broken.tokenize("\n\n1. foo") == ["ĊĊ", "1", ".", "Ġfoo"]
    assert broken.tokenize("x  =  5") == ["x", "Ġ", "Ġ=", "ĠĠ", "5"]
    fixed, reference = TextTokenizer(broken), tokenizer_of("smollm2")
    for text in ["\n\n1. foo", "x  =  5", "in 1984,  12\t7", "def f(x):\n    return 10 ** 2\n", "日本 2025年  3月"]:
        assert fixed.encode(text) == reference.encode(text)
    assert not fix_gguf_tokenizer(broken, path), "the step is there already"


def test_a_missing_pre_tokenizer(tmp_path: Path) -> None:
    tokenizer = wrap(byte_level())
    tokenizer.backend_tokenizer.pre_tokenizer = None
    assert fix_gguf_tokenizer(tokenizer, write(tmp_path / "model.gguf", "smollm"))
    assert tokenizer.tokenize("a 12") == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize("pre", ["default", None])
def test_other_files_are_left_alone(pre: str | None, tmp_path: Path) -> None:
    tokenizer = wrap(byte_level())
    assert not fix_gguf_tokenizer(tokenizer, write(tmp_path / "model.gguf", pre))
    assert isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)


def test_a_string_behind_values_of_every_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "some-pre")
    assert read_gguf_string(path, KEY) == "some-pre"
    assert read_gguf_string(str(path), "general.architecture") == "llama"
    assert read_gguf_string(path, "a.bool") is None
    assert read_gguf_string(path, "no.such.key") is None


def test_the_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    key, value = KEY.encode(), b"smollm"
    path.write_bytes(
        b"GGUF" + struct.pack(f">IQQQ{len(key)}sIQ{len(value)}s", 3, 0, 1, len(key), key, 8, len(value), value)
    )
    assert read_gguf_string(path, KEY) == "smollm"


@pytest.mark.parametrize("data", [b"GGUF", b"not a model, but a longer text", b"GGUF" + bytes(40)])
def test_no_gguf_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidRequestError, match="GGUF file"):
        read_gguf_string(path, KEY)


def test_a_file_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "smollm")
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises(InvalidRequestError, match="cut off"):
        read_gguf_string(path, KEY)
