"""Text to token ids and back, for every thread, over a transformers tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from cbengine.errors import InvalidRequestError
from cbengine.text.base import IncrementalDetokenizer
from cbengine.text.chat import apply_chat_template
from cbengine.text.decoders import DetokenizerFactory, as_byte, detokenizer_factory, window_factory
from cbengine.text.detokenize import TokenTable, WindowSource
from cbengine.text.gguf import fix_gguf_tokenizer

__all__ = ["TextTokenizer", "fix_gguf_tokenizer"]

_MOST_KEPT = 16  # sets of shown special tokens whose tables are remembered


class TextTokenizer:
    """Implements `text.base.Tokenizer` over a transformers tokenizer, which it takes as it is now.

    A tokenizer with a Rust backend is used through a private copy of that backend: truncation and padding are state
    there, and a call with other settings from another thread would change them under us. The copy shares the vocabulary
    and costs milliseconds. Tokens added to the tokenizer later are not seen. Tokenizers in Python, and those that
    override how Rust encodes or decodes, are called themselves, and encode one text at a time; they should not be used
    elsewhere meanwhile.

    Attributes: `vocab_size` counts added tokens; `eos_token_id` is None where there is none; `hf` is the tokenizer
    given; `special_tokens` are the ids, by their names, of the tokens that texts are without. Building takes 0.3 s for
    262k tokens (the detokenizer's tables).
    """

    vocab_size: int
    eos_token_id: int | None
    has_chat_template: bool
    special_tokens: Mapping[str, int]

    def __init__(self, tokenizer: Any) -> None:
        self.hf = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_token_id = getattr(tokenizer, "eos_token_id", None)
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self._lock = threading.Lock()  # encoding through `hf`
        backend = getattr(tokenizer, "backend_tokenizer", None)
        private = _private_copy(backend) if isinstance(backend, Backend) else None
        self._encoder = private if _inherits(tokenizer, "encode", "_encode_plus", "__call__") else None
        self._decoder = private if _inherits(tokenizer, "decode", "_decode") else None
        self._make: DetokenizerFactory
        self._keeping: dict[frozenset[int], DetokenizerFactory] = {}
        if self._decoder is not None:
            self._make = detokenizer_factory(self._decoder)
            added = self._decoder.get_added_tokens_decoder()
            self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        else:
            self._known = _Known(tokenizer)
            source = WindowSource(self.decode, self._known.silent, self._known.byte_like)
            self._make = window_factory(source, [range(self.vocab_size)])
            self.special_tokens = self._known.specials

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, never truncated. Special tokens written in the text count as such.

        Any thread, several at a time; releases the GIL while it works.

        Raises:
            InvalidRequestError: `text` is not a str, or is no valid Unicode (lone surrogates).
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"the prompt must be a str (or a list of token ids), not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the prompt has a lone surrogate, {text[error.start]!a} at position {error.start}: half a UTF-16"
                " character, which has no meaning; decode the input with errors='replace'"
            ) from error
        if self._encoder is not None:
            return self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        with self._lock:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text at once: special tokens and ids outside the vocabulary skipped, blanks not cleaned up."""
        if self._decoder is not None:
            return self._decoder.decode(list(ids), skip_special_tokens=True)
        known = [token_id for token_id in ids if self._known.token(token_id) is not None]
        return self.hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def detokenizer(self, keep: frozenset[int] = frozenset()) -> IncrementalDetokenizer:
        """The text of one new answer, token by token: the joined texts equal `decode` of all its ids.

        `keep`: special tokens that have text in this answer, their own names, so that a parser of tool calls or of
        reasoning sees its markers. Get them from `ids_of_special`. Any thread.
        """
        if not keep:
            return self._make()
        make = self._keeping.get(keep)
        if make is None:
            if len(self._keeping) >= _MOST_KEPT:
                self._keeping = {}
            make = self._keeping[keep] = self._make.keeping(keep, self._decode_all)
        return make()

    def ids_of_special(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens whose names are among `texts`; the other texts are no special tokens of this tokenizer.

        `detokenizer(keep=ids_of_special(markers(...)))` shows them.
        """
        return frozenset(self.special_tokens[text] for text in texts if text in self.special_tokens)

    @property
    def table(self) -> TokenTable | None:
        """What each token adds to a text; None where only the whole decoder knows. Shared: not to be changed."""
        return self._make.source if isinstance(self._make.source, TokenTable) else None

    def _decode_all(self, ids: Sequence[int]) -> str:
        """Like `decode`, with the names of special tokens."""
        if self._decoder is not None:
            return self._decoder.decode(list(ids), skip_special_tokens=False)
        return self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation; see `text.chat.apply_chat_template` for options and errors."""
        return apply_chat_template(self.hf, messages, **options)


class _Known:
    """What a tokenizer without a usable Rust backend says of single ids, asked once for each id."""

    def __init__(self, tokenizer: Any) -> None:
        self._convert: Callable[[int], object] = tokenizer.convert_ids_to_tokens
        self._specials = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._tokens: dict[int, str | None] = {}
        self.specials = {token: i for i in sorted(self._specials) if (token := self.token(i)) is not None}

    def token(self, token_id: int) -> str | None:
        """The token's string, or None if there is no such token."""
        if token_id not in self._tokens:
            try:
                token = self._convert(token_id)
            except Exception:  # how a tokenizer in Python says that it has no such id
                token = None
            self._tokens[token_id] = token if isinstance(token, str) else None
        return self._tokens[token_id]

    def silent(self, token_id: int) -> bool:
        return token_id in self._specials or self.token(token_id) is None

    def byte_like(self, token_id: int) -> bool:
        return isinstance(as_byte(self.token(token_id) or ""), bytes)


def _inherits(tokenizer: Any, *names: str) -> bool:
    """Whether these methods are those of transformers' own base classes, so that the Rust backend alone decides."""
    methods = [getattr(type(tokenizer), name, None) for name in names]
    return all(method.__module__.startswith("transformers.tokenization_utils") for method in methods if method)


def _private_copy(backend: Backend) -> Backend | None:
    """A tokenizer of the same parts without truncation and padding. Shares the model; other settings are its own.

    None where that cannot be had: added tokens get the next free ids, which are others if the vocabulary has gaps.
    """
    copy = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(copy, part, value)
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([added[token_id] for token_id in sorted(added)])
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy if _same_added_tokens(copy, backend) else None


def _same_added_tokens(a: Backend, b: Backend) -> bool:
    def facts(backend: Backend) -> dict[int, tuple[object, ...]]:
        tokens = backend.get_added_tokens_decoder()
        return {i: (t.content, t.special, t.normalized, t.lstrip, t.rstrip, t.single_word) for i, t in tokens.items()}

    return facts(a) == facts(b)
