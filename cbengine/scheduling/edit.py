"""What one request wants changed in its logits, in the form in which the batch takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class LogitEdit:
    """Made at the call, from `logit_bias`, `bad_words` and `allowed_token_ids`."""

    tokens: np.ndarray
    """int32 [b]: tokens whose logits get `values` (float32 [b]) added at every step; -inf forbids one."""
    values: np.ndarray
    words: tuple[tuple[int, ...], ...] = ()
    """Sequences of two tokens or more whose last token is forbidden after the others. They depend on the tokens before,
    so such a request is scheduled in lockstep: it sits out a step rather than being scheduled ahead of its own tokens."""
    mask: np.ndarray | None = None
    """int32 [words]: bit i of word w set if token 32 * w + i may be drawn."""


def pack_mask(allowed: Sequence[int], vocab_size: int) -> np.ndarray:
    """The bit mask of the allowed token ids: int32 [ceil(vocab_size / 32)]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
