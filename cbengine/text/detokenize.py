"""Incremental detokenization: one answer's token ids in, text out, each piece as soon as it is certain.

The law, for every sequence of token ids (ids outside the vocabulary and special tokens have no text):

    "".join(push(id) for id in ids) + flush() == decode(ids)

and no push emits U+FFFD unless the bytes are truly invalid. Three ways keep it; `decoders.detokenizer_factory` picks
one for each tokenizer, and tries it against the backend's own decode before it is used:

- `ByteDetokenizer`, for the ByteLevel decoder (GPT-2, Llama 3, Qwen, SmolLM, OLMo): a token is a string of bytes, and
  the text is their UTF-8 decoding with replacement.
- `PieceDetokenizer`, for sentencepiece-like decoders, [Replace | Metaspace]... [ByteFallback] [Fuse] [Strip] (Llama 2,
  Mistral, Gemma, Phi-3, T5). A token is a string; `<0xE2>` tokens are bytes, and a run of them is text if the whole run
  is valid UTF-8, else one U+FFFD for each byte (the rule of the Rust library): it is certain only when it has ended.
- `WindowDetokenizer`, for all other decoders: decodes the last few tokens again at every push.

The first two answer a push with one list lookup in the usual case (about 0.1 us; the window takes 3 to 5 us). All
methods of a detokenizer run on one thread, the engine's. The tables are shared and never change.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What each token id adds to an answer. Built once, shared by every detokenizer of a tokenizer.

    `texts[id]` is the text of a token that is complete by itself, "" for an id without text, or None where only bytes
    are known: then `raw[id]` has them. `silent` are the ids that decode leaves out (special tokens, holes): unlike a
    token with an empty text they do not end a run of bytes, nor are they the first token. `head(id)` is the text or the
    byte of a token that comes first, where that may differ from the table. `strip` = (character, most of them to take
    off the start of the answer).
    """

    texts: list[str | None]
    raw: dict[int, bytes]
    silent: frozenset[int]
    head: Callable[[int], str | bytes] | None = None
    strip: tuple[str, int] = ("", 0)


class ByteDetokenizer:
    """Tokens are bytes: emits characters as soon as their last byte is there."""

    __slots__ = ("_pending", "_raw", "_texts")

    def __init__(self, table: TokenTable) -> None:
        self._texts = table.texts
        self._raw = table.raw
        self._pending = b""  # the start of a character, at most 3 bytes

    def push(self, token_id: int) -> str:
        """Add a token (id >= 0); return the text that is now certain."""
        assert token_id >= 0
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        pending = self._pending
        if pending:
            data = pending + (self._raw[token_id] if text is None else text.encode())
        elif text is None:
            data = self._raw[token_id]
        else:
            return text
        # Python and Rust agree on the number of U+FFFD for every invalid sequence: one per maximal subpart.
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text


class _ByteRun:
    """The byte tokens since the last ordinary token: text if all of them are valid UTF-8, else one U+FFFD for each."""

    __slots__ = ("broken", "length", "tail", "text")

    def __init__(self) -> None:
        self.length = 0
        self.text = ""
        self.tail = b""
        self.broken = False

    def add(self, byte: bytes) -> str:
        """Return what is certain: nothing while the run may still turn out valid, all of it once it is broken."""
        self.length += 1
        if self.broken:
            return REPLACEMENT
        data = self.tail + byte
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self.broken = True
            return REPLACEMENT * self.length
        self.text += text
        self.tail = data[used:]
        return ""

    def rest(self) -> str:
        """The text still owed when the run ends here."""
        if self.broken:
            return ""
        return REPLACEMENT * self.length if self.tail else self.text


class PieceDetokenizer:
    """Tokens are strings, some of them single bytes: emits strings at once, and bytes when their run has ended."""

    __slots__ = ("_head", "_run", "_silent", "_slow", "_strip", "_table", "_texts")

    def __init__(self, table: TokenTable) -> None:
        self._texts = table.texts
        self._table = table
        self._head = table.head  # None once the first token has come
        self._strip = table.strip[1]  # 0 once the start is stripped
        self._run = _ByteRun()
        self._slow = bool(self._head or self._strip)  # a push has more to do than look the text up

    def push(self, token_id: int) -> str:
        """Add a token (id >= 0); return the text that is now certain."""
        assert token_id >= 0
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        if text is None or self._slow:
            return self._push_slow(token_id, text)
        return text

    def _push_slow(self, token_id: int, text: str | None) -> str:
        if token_id in self._table.silent:
            return ""
        piece: str | bytes = self._table.raw[token_id] if text is None else text
        if self._head is not None:
            piece, self._head = self._head(token_id), None
        text = self._run.add(piece) if isinstance(piece, bytes) else self._end_run() + piece
        if self._strip:
            text = self._strip_start(text)
        self._slow = bool(self._run.length or self._strip)
        return text

    def _end_run(self) -> str:
        if not self._run.length:
            return ""
        text, self._run = self._run.rest(), _ByteRun()
        return text

    def _strip_start(self, text: str) -> str:
        character = self._table.strip[0]
        while self._strip and text.startswith(character):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text

    def flush(self) -> str:
        text = self._end_run()
        return self._strip_start(text) if self._strip else text


@dataclass(frozen=True, slots=True)
class WindowSource:
    """What a `WindowDetokenizer` asks of a tokenizer. `decode` is the full decode; `silent` tells the ids that it
    leaves out; `unsettled` tells ids after which the text so far may still change, so that nothing is emitted yet.
    """

    decode: Decode
    silent: Callable[[int], bool]
    unsettled: Callable[[int], bool]


class WindowDetokenizer:
    """Any decoder whose text, but for its end, depends on a few neighbouring tokens: decodes a window at every push.

    The window begins where text was emitted some tokens ago, so it never begins within a character. New text is what
    the window has beyond the text of the tokens emitted before. `flush` decodes the whole answer.
    """

    CONTEXT = 4  # emissions that the window reaches back

    __slots__ = ("_context", "_emitted", "_ids", "_marks", "_source", "_start")

    def __init__(self, source: WindowSource) -> None:
        self._source = source
        self._ids: list[int] = []
        self._marks: deque[int] = deque()  # lengths of _ids at which all text was emitted
        self._start = 0
        self._context = ""  # the emitted part of the window's text
        self._emitted: list[str] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        source = self._source
        if source.silent(token_id):
            return ""
        self._ids.append(token_id)
        if source.unsettled(token_id):
            return ""
        text = source.decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT) or not text.startswith(self._context):
            return ""
        new = text[len(self._context) :]
        if not new:  # no mark here: the bytes of an unfinished character may have been left out silently
            return ""
        self._emitted.append(new)
        self._marks.append(len(self._ids))
        if len(self._marks) > self.CONTEXT:
            self._start = self._marks.popleft()
            text = source.decode(self._ids[self._start :])
        self._context = text
        return new

    def flush(self) -> str:
        if not self._ids:
            return ""
        rest = self._source.decode(self._ids)[sum(map(len, self._emitted)) :]
        self._emitted.append(rest)
        return rest
