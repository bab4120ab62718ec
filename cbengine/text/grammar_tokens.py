"""A tokenizer as llguidance wants it: the bytes of every token, and how the model's tokenizer writes a text."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from cbengine.errors import UnsupportedFeatureError
from cbengine.text.tokenize import TextTokenizer

_SPECIAL = b"\xff"
"""llguidance's mark of special tokens: a byte that no text has, so that no text is made of them."""


def check_usable(tokenizer: TextTokenizer, eos_token_ids: Sequence[int]) -> None:
    """Raises `UnsupportedFeatureError` for a tokenizer that no grammar can be made for."""
    if tokenizer.table is None:
        raise UnsupportedFeatureError(
            "structured output is not supported for this model: the texts of its tokens are not known one by one"
            " (byte-level and sentencepiece-like tokenizers with a Rust backend are supported)"
        )
    if not eos_token_ids:
        raise UnsupportedFeatureError("structured output needs an end-of-sequence token, and this model has none")


class GrammarTokens:
    """The interface of `llguidance.TokenizerWrapper`, over the table that the detokenizer uses.

    Not `llguidance.hf`: that parses the whole tokenizer again (four times the time, with the GIL held), takes no
    vocabulary larger than the logits, and reads some tokens otherwise than our detokenizer shows them.

    Holds the tokenizer weakly: the library's object, which holds this, is no part of Python's garbage collection.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        check_usable(tokenizer, eos_token_ids)
        table = tokenizer.table
        assert table is not None
        tokens = [text.encode() if text is not None else table.raw[i] for i, text in enumerate(table.texts)]
        for name, token_id in tokenizer.special_tokens.items():
            tokens[token_id] = _SPECIAL + name.encode()
        del tokens[vocab_size:]
        tokens += [b""] * (vocab_size - len(tokens))  # ids without text are never allowed
        self.tokens = tokens
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids: list[int] = []  # they have the mark already
        self._tokenizer = weakref.ref(tokenizer)
        self._greedy: dict[bytes, int] | None = None

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are those of `text`: how the tokenizer writes it, if it does so to the byte.

        It does not where it normalizes, puts a blank in front, or takes a part for a special token.
        """
        tokenizer = self._tokenizer()
        data = text.encode()
        if tokenizer is not None:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if b"".join([self.tokens[i] for i in ids if i < len(self.tokens)]) == data:
                return ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """From the left, always the longest token that fits."""
        if self._greedy is None:
            self._greedy = {token: i for i, token in enumerate(self.tokens) if token}
        longest, ids, at = max(map(len, self._greedy)), [], 0
        while at < len(data):
            for end in range(min(len(data), at + longest), at, -1):
                if (token_id := self._greedy.get(data[at:end])) is not None:
                    ids.append(token_id)
                    at = end
                    break
            else:
                return ids
        return ids
