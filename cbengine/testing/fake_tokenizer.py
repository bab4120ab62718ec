"""A tokenizer with one character for each token id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ASCII = range(2, 97)  # ids of " " to "~"
_FIRST_BEYOND = 0xA1  # id 97 and up: the characters from here on


class FakeTokenizer:
    """One character per id and one id per character, so texts and ids can be compared by eye.

    Id 1 is the line feed, 2 to 96 are the printable ASCII characters in their order, 97 and up are the characters from
    U+00A1 on. A character that has no id is encoded as that of some other one, always the same. Id 0 and those in
    `special_ids` have no text, and no text is encoded as them. May be used by several threads at a time: it never
    changes.

    Args:
        vocab_size: number of ids, at least 3.
        special_ids: ids without text, such as the end of the sequence. At least one other id must be left.
    """

    def __init__(self, vocab_size: int = 97, special_ids: Sequence[int] = (0,)) -> None:
        if vocab_size < 3:
            raise ValueError(f"vocab_size must be at least 3, got {vocab_size}")
        self.vocab_size = vocab_size
        self.special_ids = frozenset(special_ids) | {0}
        self._texts = ["" if i in self.special_ids else _character(i) for i in range(vocab_size)]
        self._ids = {text: i for i, text in enumerate(self._texts) if text}
        self._plain = list(self._ids.values())
        if not self._plain:
            raise ValueError(f"all {vocab_size} ids are special: there is nothing to encode text with")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """One id for each character. There are no tokens to add: `add_special_tokens` changes nothing."""
        return [self._ids[c] if c in self._ids else self._plain[ord(c) % len(self._plain)] for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """One character for each id that is not special. Raises `IndexError` for an id out of the vocabulary."""
        return "".join(map(self._texts.__getitem__, ids))

    def detokenizer(self, keep: frozenset[int] = frozenset()) -> FakeDetokenizer:
        """The text of one growing answer. Special ids have no character, so `keep` changes nothing."""
        return FakeDetokenizer(self)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """One line "role: content" for each message, then "assistant: " unless `add_generation_prompt=False`."""
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return lines + ("assistant: " if options.get("add_generation_prompt", True) else "")


class FakeDetokenizer:
    """Every token is a whole character, so nothing is ever held back."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> str:
        return self._tokenizer.decode((token_id,))

    def flush(self) -> str:
        return ""


def _character(token_id: int) -> str:
    if token_id == 1:
        return "\n"
    if token_id in _ASCII:
        return chr(ord(" ") + token_id - _ASCII.start)
    point = _FIRST_BEYOND + token_id - _ASCII.stop
    return chr(point if point < 0xD800 else point + 0x800)  # surrogates are no characters
