"""How a tokenizer's decoder is turned into detokenizers: reads the decoder of the Rust library, builds the token table.

`detokenizer_factory` is called once per tokenizer, when it is loaded. What it picks is tried on a sample of sequences,
and gives way to the next more general one where the joined texts differ from the backend's own decode.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer as Backend

from cbengine.text.base import IncrementalDetokenizer
from cbengine.text.detokenize import (
    ByteDetokenizer,
    Decode,
    PieceDetokenizer,
    TokenTable,
    WindowDetokenizer,
    WindowSource,
)

Factory = Callable[[], IncrementalDetokenizer]


@dataclass(frozen=True, slots=True)
class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer: `build(source)`. Never changes, so any thread may use it."""

    build: Callable[[Any], IncrementalDetokenizer]
    source: TokenTable | WindowSource

    def __call__(self) -> IncrementalDetokenizer:
        return self.build(self.source)

    def keeping(self, keep: frozenset[int], decode_all: Decode) -> DetokenizerFactory:
        """The same, but the special tokens `keep` have text. `decode_all` leaves no token of the vocabulary out.

        Copies the table: a millisecond for 262k tokens.
        """
        source = self.source
        if isinstance(source, TokenTable):
            shown = keep & source.silent
            texts = list(source.texts)
            for token_id in shown:
                texts[token_id] = decode_all([token_id])
            return DetokenizerFactory(self.build, replace(source, texts=texts, silent=source.silent - shown))
        silent = source.silent

        def decode(ids: Sequence[int]) -> str:
            return decode_all([i for i in ids if i in keep or not silent(i)])

        hidden = WindowSource(decode, lambda i: i not in keep and silent(i), source.unsettled)
        return DetokenizerFactory(self.build, hidden)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_MAX_ID_GAP = 4096  # ids without a token that may follow each other before the vocabulary is taken to have ended


@dataclass(slots=True)
class _Plan:
    """A decoder that the tables know, as read from its JSON form."""

    byte_level: bool = False
    byte_fallback: bool = False
    maps: list[dict[str, Any]] = field(default_factory=list)
    strip: tuple[str, int] = ("", 0)

    def apply(self, token: str, first: bool = False) -> str:
        """The maps before ByteFallback, on one token."""
        for step in self.maps:
            if step["type"] == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            else:
                drop = first and step["prepend_scheme"] != "never"
                token = token.replace(step["replacement"], "" if drop else " ")
        return token

    @property
    def first_differs(self) -> bool:
        return any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in self.maps)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _is_local(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether the text of a token depends on its neighbours only, so that a window over the tokens shows it.

    Not so where a step looks for longer strings in the joined text: they may begin anywhere before.
    """
    joined = False
    for step in steps:
        kind = step["type"]
        if joined and kind == "Replace" and len(step["pattern"].get("String", "")) != 1:
            return False
        if joined and kind not in ("Fuse", "Metaspace", "Replace", "Strip"):
            return False
        joined = joined or kind in ("ByteLevel", "Fuse")
    return True


def _is_map(step: dict[str, Any]) -> bool:
    return step["type"] == "Metaspace" or (step["type"] == "Replace" and bool(step["pattern"].get("String")))


def _decoder_steps(backend: Backend) -> list[dict[str, Any]] | None:
    """The backend's decoder in JSON form, sequences flattened; None if it has none (no decoder, or one in Python)."""
    if backend.decoder is None:
        return None
    try:
        return _flatten(json.loads(backend.decoder.__getstate__()))
    except Exception:
        return None


def _read_plan(decoder: Sequence[dict[str, Any]]) -> _Plan | None:
    """The plan of a decoder, or None where the tables do not cover it."""
    steps = deque(decoder)
    plan = _Plan()
    if [step["type"] for step in steps] == ["ByteLevel"]:
        plan.byte_level = True
        return plan
    while steps and _is_map(steps[0]):
        plan.maps.append(steps.popleft())
    if steps and steps[0]["type"] == "ByteFallback":
        plan.byte_fallback = bool(steps.popleft())
    fused = False
    while steps and steps[0]["type"] == "Fuse":
        fused = bool(steps.popleft())
    if fused and steps and steps[0]["type"] == "Strip" and steps[0]["stop"] == 0:
        step = steps.popleft()
        plan.strip = (step["content"], step["start"])
    return None if steps else plan


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary (GPT-2's `bytes_to_unicode`, turned round)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _all_tokens(backend: Backend, added: Iterable[int]) -> list[str | None]:
    """Token strings by id; None for holes. The vocabulary may have gaps, so its size is not its last id."""
    last = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    tokens: list[str | None] = list(map(backend.id_to_token, range(last)))
    while len(tokens) - last < _MAX_ID_GAP:
        tokens.append(backend.id_to_token(len(tokens)))
        if tokens[-1] is not None:
            last = len(tokens)
    return tokens[:last]


def _byte_level_table(tokens: list[str | None], silent: frozenset[int]) -> TokenTable:
    alphabet = _byte_alphabet()
    texts: list[str | None] = []
    raw: dict[int, bytes] = {}
    for token_id, token in enumerate(tokens):
        if token is None or token_id in silent:
            texts.append("")
            continue
        try:
            data = bytes([alphabet[character] for character in token])
        except KeyError:  # the Rust library takes a token with a foreign character as it stands
            texts.append(token)
            continue
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            texts.append(None)
            raw[token_id] = data
    return TokenTable(texts, raw, silent)


def _piece_table(backend: Backend, plan: _Plan, tokens: list[str | None], silent: frozenset[int]) -> TokenTable:
    texts: list[str | None] = ["" if token is None else plan.apply(token) for token in tokens]
    for token_id in silent:
        texts[token_id] = ""
    raw: dict[int, bytes] = {}
    if plan.byte_fallback:
        candidates = [i for i, text in enumerate(texts) if text and len(text) == 6 and text.startswith("<0x")]
        for token_id in candidates:
            if isinstance(piece := as_byte(texts[token_id] or ""), bytes):
                texts[token_id], raw[token_id] = None, piece

    def head(token_id: int) -> str | bytes:
        text = plan.apply(backend.id_to_token(token_id) or "", first=True)
        return as_byte(text) if plan.byte_fallback else text

    return TokenTable(texts, raw, silent, head if plan.first_differs else None, plan.strip)


def as_byte(text: str) -> str | bytes:
    """`<0x41>` as b"A", anything else as it is."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes((int(match[1], 16),)) if match else text


def _obeys_law(make: Factory, decode: Decode, pools: Sequence[Sequence[int]]) -> bool:
    """Whether the joined texts equal the full decode, on seeded random sequences and on single tokens.

    `pools`: first all ids, then kinds of ids that deserve as much attention (bytes, parts of characters, added tokens).
    """
    rng = random.Random(0)
    everything, *_ = pools = [pool for pool in pools if pool]
    samples = [[rng.choice(everything) for _ in range(24)] for _ in range(32)]
    samples += [[rng.choice(rng.choice(pools)) for _ in range(24)] for _ in range(32)]
    samples += [[token_id] for token_id in everything[:: max(1, len(everything) // 128)]]
    for ids in samples:
        detokenizer = make()
        if "".join(map(detokenizer.push, ids)) + detokenizer.flush() != decode(ids):
            return False
    return True


def window_factory(source: WindowSource, pools: Sequence[Sequence[int]], local: bool = True) -> DetokenizerFactory:
    """Detokenizers for a decoder without a table. Where even the window breaks the law, all text comes at the flush.

    `pools`: ids to try, as for `_obeys_law`. `local`: False if a window is known not to show all that changes.
    """
    make = DetokenizerFactory(WindowDetokenizer, source)
    patient = DetokenizerFactory(WindowDetokenizer, WindowSource(source.decode, source.silent, lambda _: True))
    try:
        return make if local and _obeys_law(make, source.decode, pools) else patient
    except Exception:  # a tokenizer in Python may fail on a random sequence: nothing is known about it
        return patient


def detokenizer_factory(backend: Backend) -> DetokenizerFactory:
    """How to make the detokenizers of a Rust tokenizer, which must not change afterwards. 0.25 s for 262k tokens."""
    added = backend.get_added_tokens_decoder()
    specials = {token.content for token in added.values() if token.special}
    tokens = _all_tokens(backend, added)
    # The Rust library goes by the string, not by the id.
    silent = frozenset(i for i, token in enumerate(tokens) if token is None or token in specials)
    everything = range(len(tokens) + 1)  # the last one is no token

    def decode(ids: Sequence[int]) -> str:
        return backend.decode(list(ids), skip_special_tokens=True)

    steps = _decoder_steps(backend)
    plan = _read_plan(steps) if steps is not None else None
    if plan is not None:
        table = _byte_level_table(tokens, silent) if plan.byte_level else _piece_table(backend, plan, tokens, silent)
        make = DetokenizerFactory(ByteDetokenizer if plan.byte_level else PieceDetokenizer, table)
        if _obeys_law(make, decode, [everything, list(table.raw), list(added)]):
            return make
    byte_like = frozenset(i for i, token in enumerate(tokens) if token and isinstance(as_byte(token), bytes))
    source = WindowSource(decode, lambda i: i in silent or i >= len(tokens), byte_like.__contains__)
    return window_factory(source, [everything, list(byte_like), list(added)], steps is None or _is_local(steps))
