"""Random answers under a grammar, without a model."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np

from cbengine.text.structured import Grammar, GrammarState, StructuredSpec, compile_grammar
from tests.text.tokenizers import tokenizer_of

WIDTH = {"smollm2": 49152 + 70, "gemma3": 262144 + 64}
"""Logits somewhat wider than the tokenizer, as many models have them."""


def compiled(name: str, spec: StructuredSpec) -> Grammar:
    return compile_grammar(spec, tokenizer_of(name), WIDTH[name])


@functools.cache
def enders(name: str) -> tuple[int, ...]:
    """Tokens that bring an answer to its end: otherwise random strings and lists go on for very long."""
    tokenizer = tokenizer_of(name)
    return tuple(tokenizer.encode(text, add_special_tokens=False)[-1] for text in ('"', "}", "]", '"}', ")", "."))


def allowed(state: GrammarState, grammar: Grammar) -> list[int]:
    """The ids that the mask allows."""
    mask = np.full(grammar.words, -1, np.int32)
    state.fill_mask(mask)
    return ids_of(mask)


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@dataclass(frozen=True, slots=True)
class Walk:
    """One random answer."""

    text: str
    ids: list[int]
    complete: bool
    """It ended where the grammar ends; otherwise it is cut off."""


def walk(name: str, spec: StructuredSpec, seed: int, limit: int = 120) -> Walk:
    """Up to `limit` tokens, each a random one of those that the mask allows."""
    rng, tokenizer = random.Random(seed), tokenizer_of(name)
    grammar = compiled(name, spec)
    state, ids = grammar.start(), []
    mask, end = np.zeros(grammar.words, np.int32), tokenizer.eos_token_id
    assert end is not None
    while len(ids) < limit and not state.finished:
        state.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits)
        assert choices[-1] < tokenizer.vocab_size
        ends = [i for i in (*enders(name), end) if bits[i]]
        token_id = int(rng.choice(ends if ends and rng.random() < 0.4 else choices))
        state.accept(token_id)
        if token_id == end:
            assert state.finished
            break
        ids.append(token_id)
    return Walk(tokenizer.decode(ids), ids, state.finished)
