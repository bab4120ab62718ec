"""Tokenizers for the tests of text handling: the real ones, and tiny ones for each kind of decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from cbengine.text.base import IncrementalDetokenizer
from cbengine.text.tokenize import TextTokenizer
from tests.support.models import model_folder


@functools.cache
def real(name: str) -> Any:
    """The transformers tokenizer of a real model. Shared: not to be changed."""
    return AutoTokenizer.from_pretrained(model_folder(name))


@functools.cache
def tokenizer_of(name: str) -> TextTokenizer:
    """The same for the engine. Shared, and it keeps no state."""
    return TextTokenizer(real(name))


def wrap(backend: Tokenizer, **options: Any) -> Any:
    """A transformers tokenizer over a Rust one."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def joined(detokenizer: IncrementalDetokenizer, ids: Iterable[int]) -> str:
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()


def word_level(tokens: list[str], decoder: Any, special: tuple[str, ...] = ("<s>",)) -> Tokenizer:
    """Token i is `tokens[i]`, whatever it looks like: what counts here is the decoder."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_tokens([AddedToken(token, special=True) for token in special])
    return backend


BYTES = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x80, 0x9F, 0xA9, 0xC3, 0xE2, 0x96, 0x81, 0xF0, 0x98, 0xFF)]
PIECES = ["▁", "▁▁", "▁the", "the", "a▁b▁", " ", "é", "日本", "\ufffd", "<0x4>", "<0xZZ>", "<0x+1>", "▁<0x41>", "👩"]
WORDS = ["low", "##er", "##", "low</w>", "er</w>", "</w>", ".", "'s", "n't", "|", "<pad>", "a", "b", "ab", " "]


def tiny(kind: str) -> Tokenizer:
    """A tokenizer with one kind of decoder."""
    tokens = [*PIECES, *BYTES, *WORDS]
    return word_level(list(dict.fromkeys(tokens)), DECODERS[kind]())


def _sequence(*steps: Any) -> Callable[[], Any]:
    return lambda: decoders.Sequence(list(steps))


_REPLACE, _BYTES, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
_STRIP = decoders.Strip(" ", 1, 0)

TABLE_DECODERS: dict[str, Callable[[], Any]] = {
    "llama": _sequence(_REPLACE, _BYTES, _FUSE, _STRIP),
    "gemma": _sequence(_REPLACE, _BYTES, _FUSE),
    "nested": _sequence(decoders.Sequence([_REPLACE, _BYTES]), _FUSE, decoders.Strip(" ", 3, 0)),
    "no bytes": _sequence(_REPLACE, _FUSE, _STRIP),
    "replace": lambda: _REPLACE,
    "fuse": lambda: decoders.Fuse(),
    "metaspace always": lambda: decoders.Metaspace(prepend_scheme="always"),
    "metaspace first": lambda: decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": lambda: decoders.Metaspace(prepend_scheme="never"),
    "metaspace, bytes": _sequence(decoders.Metaspace(), _BYTES, _FUSE),
    "byte level": lambda: decoders.ByteLevel(),
}
"""Decoders that a table of tokens covers."""

WINDOW_DECODERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "wordpiece": lambda: decoders.WordPiece(),
    "wordpiece, no cleanup": lambda: decoders.WordPiece(cleanup=False),
    "bpe": lambda: decoders.BPEDecoder(),
    "ctc": lambda: decoders.CTC(),
    "strip each token": _sequence(_REPLACE, decoders.Strip(" ", 1, 0)),
    "bytes, then replace": _sequence(_BYTES, _REPLACE, _FUSE),
    "replace by regex": lambda: decoders.Replace(Regex("▁+"), " "),
    "replace after fuse": _sequence(_BYTES, _FUSE, _REPLACE),
    "strip after bytes": _sequence(decoders.ByteLevel(), _STRIP),
}
"""Decoders that need the neighbours of a token."""

PATIENT_DECODERS: dict[str, Callable[[], Any]] = {
    "longer strings after fuse": _sequence(_FUSE, decoders.Replace("ab", "X")),
    "regex after fuse": _sequence(_FUSE, decoders.Replace(Regex("a+b"), "X")),
}
"""Decoders whose text may change behind any distance: all of it comes at the end."""

DECODERS = TABLE_DECODERS | WINDOW_DECODERS | PATIENT_DECODERS


def byte_level(added: Iterable[AddedToken] = (), normalizer: Any = None) -> Tokenizer:
    """Every byte is a token (ids 0 to 255), and so are some longer byte strings, halves of characters among them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return backend


def with_added_tokens() -> Tokenizer:
    """Added tokens of every kind; the normalizer changes some of them."""
    return byte_level(
        [
            AddedToken("<|end|>", special=True, normalized=False),
            AddedToken("<|END|>", special=True, normalized=True),
            AddedToken("<Tool Call>", special=False, normalized=False),
            AddedToken("<Tool Reply>", special=False, normalized=True),
            AddedToken("é", special=False, normalized=False),
            AddedToken("日本", special=False, normalized=False),
        ],
        normalizers.Lowercase(),
    )


class CharacterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, without a Rust backend: one token for each of a few characters."""

    def __init__(self, **options: Any) -> None:
        self._characters = [*"abc .é日👩", "<0xE2>", "<unk>"]
        super().__init__(unk_token="<unk>", eos_token="<eos>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self._characters)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._characters.index(token) if token in self._characters else self.vocab_size - 1

    def _convert_id_to_token(self, index: int) -> str:
        return self._characters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)
