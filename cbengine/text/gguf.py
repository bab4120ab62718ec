"""Putting right what transformers gets wrong about the tokenizer of a GGUF file."""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

from tokenizers import pre_tokenizers

from cbengine.errors import InvalidRequestError

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by GGUF type
_STRING, _ARRAY = 8, 9


def fix_gguf_tokenizer(tokenizer: Any, gguf_path: str | os.PathLike[str]) -> bool:
    """Give a tokenizer that transformers read from a GGUF file its missing pre-tokenizer step; True if it was missing.

    SmolLM and SmolLM2 (`tokenizer.ggml.pre` is "smollm") split every digit off before the byte-level step. transformers
    (5.17 to 5.24) leaves that step out, and blanks before a digit then give other ids than the model was trained on.
    Call it before the tokenizer is used. Changes `tokenizer` in place; does nothing where nothing is missing.

    Raises:
        InvalidRequestError: the file is no GGUF file.
    """
    if read_gguf_string(gguf_path, "tokenizer.ggml.pre") != "smollm":
        return False
    backend = tokenizer.backend_tokenizer
    present = backend.pre_tokenizer
    if present is not None and '"Digits"' in json.dumps(json.loads(present.__getstate__())):
        return False
    rest = [pre_tokenizers.ByteLevel(add_prefix_space=False)] if present is None else [present]
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), *rest])
    return True


def read_gguf_string(path: str | os.PathLike[str], key: str) -> str | None:
    """The metadata string `key` of a GGUF file, or None if it has none.

    Reads the header only as far as the key: the `gguf` package makes an object of every token first, which takes
    seconds. Layout: magic, version, tensor count, number of keys; then for each key its name, a type and the value.

    Raises:
        InvalidRequestError: the file is no GGUF file of version 2 or later, or is cut off.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        order = "<" if data[4:6] != b"\0\0" else ">"  # the version, a small number, shows the byte order
        try:
            magic, version, _, count = struct.unpack_from(f"{order}4sIQQ", data)
            if magic != b"GGUF" or version < 2:
                raise InvalidRequestError(f"{os.fspath(path)!r} is no GGUF file of version 2 or later")
            position = 24
            for _ in range(count):
                name, position = _string(data, position, order)
                (kind,) = struct.unpack_from(f"{order}I", data, position)
                position += 4
                if name == key and kind == _STRING:
                    return _string(data, position, order)[0]
                position = _skip(data, position, kind, order)
        except (struct.error, KeyError) as error:
            raise InvalidRequestError(f"{os.fspath(path)!r} is cut off or not a GGUF file") from error
    return None


def _string(data: mmap.mmap, position: int, order: str) -> tuple[str, int]:
    """A string and the position after it: 8 bytes of length, then UTF-8."""
    (length,) = struct.unpack_from(f"{order}Q", data, position)
    end = position + 8 + length
    return data[position + 8 : end].decode("utf-8", "replace"), end


def _skip(data: mmap.mmap, position: int, kind: int, order: str) -> int:
    """The position after a value of GGUF type `kind`. An array: 4 bytes of type, 8 of length, then the values."""
    if kind == _STRING:
        (length,) = struct.unpack_from(f"{order}Q", data, position)
        return position + 8 + length
    if kind != _ARRAY:
        return position + _WIDTHS[kind]
    item, count = struct.unpack_from(f"{order}IQ", data, position)
    position += 12
    if item in _WIDTHS:
        return position + _WIDTHS[item] * count
    for _ in range(count):
        position = _skip(data, position, item, order)
    return position
