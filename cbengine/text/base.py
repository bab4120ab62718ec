"""What the engine needs from text handling. Implemented by `text.tokenize.TextTokenizer`; tests may bring their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class IncrementalDetokenizer(Protocol):
    """The text of one growing answer. Engine thread only."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain ("" while a character is incomplete)."""
        ...

    def flush(self) -> str:
        """End of the answer: the text still held back (U+FFFD for bytes that never became a character)."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. `encode` may be called from any thread, several at a time."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text at once, special tokens skipped: what the joined texts of a stream must equal."""
        ...

    def detokenizer(self, keep: frozenset[int] = frozenset()) -> IncrementalDetokenizer:
        """The text of one new answer. `keep`: special tokens that have text in it (marks of tool calls and the like)."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation (to be encoded without further special tokens)."""
        ...
