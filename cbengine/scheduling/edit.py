"""What one request wants changed in its logits, in the form in which the batch takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cbengine.errors import RequestFailedError


class Grammar(Protocol):
    """The state of one answer within its grammar (`text.structured.GrammarState`)."""

    def accept(self, token_id: int) -> None: ...

    @property
    def finished(self) -> bool: ...

    def fill_mask(self, out: np.ndarray) -> None: ...


@dataclass(slots=True)
class LogitEdit:
    """Made at the call, from `logit_bias`, `bad_words` and `allowed_token_ids`."""

    tokens: np.ndarray
    """int32 [b]: tokens whose logits get `values` (float32 [b]) added at every step; -inf forbids one."""
    values: np.ndarray
    words: tuple[tuple[int, ...], ...] = ()
    """Sequences of two tokens or more whose last token is forbidden after the others."""
    allowed: np.ndarray | None = None
    """int32 [words]: bit i of word w set if token 32 * w + i may be drawn at all."""
    grammar: Grammar | None = None
    """What the answer's text must be like. Such a request is scheduled in lockstep as well."""
    mask: np.ndarray | None = None
    """int32 [words]: the tokens that may be drawn next: those that are allowed and that the grammar allows now."""

    def __post_init__(self) -> None:
        if self.mask is None:
            self.mask = self.allowed

    @property
    def lockstep(self) -> bool:
        """The next logits depend on the tokens before: the request sits out a step until they are known."""
        return bool(self.words) or self.grammar is not None

    def follow(self, grammar: Grammar, words: int) -> None:
        """Let `grammar` decide from here on; `words` is the length of a mask. Any thread, before the first token."""
        self.grammar = grammar
        self.mask = np.zeros(words, np.int32)
        self._ask()

    def advance(self, token: int) -> bool:
        """The answer goes on with `token`. True: the grammar is complete, and the answer ends here."""
        assert self.grammar is not None
        self.grammar.accept(token)
        if self.grammar.finished:
            return True
        self._ask()
        return False

    def _ask(self) -> None:
        assert self.grammar is not None and self.mask is not None
        self.grammar.fill_mask(self.mask)
        if self.allowed is not None:
            self.mask &= self.allowed
            if not self.mask.any():
                raise RequestFailedError("the answer's grammar allows none of allowed_token_ids here")


def pack_mask(allowed: Sequence[int], vocab_size: int) -> np.ndarray:
    """The bit mask of the allowed token ids: int32 [ceil(vocab_size / 32)]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
