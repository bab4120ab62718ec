"""Every processor at once, in mixed batches: what we sample from is what transformers' processors give, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from cbengine.devices.inline import InlineDevice
from cbengine.execution.processors import PenaltyLoad, PenaltyTables, ProcessorInputs, process
from cbengine.execution.sampler import distribution
from cbengine.scheduling.edit import pack_mask
from tests.sampling.rows import Row, inputs, is_a_near_miss, reference

VOCAB = 40
EOS = 2

tokens = st.integers(0, VOCAB - 1)
numbers = st.floats(-2, 2, width=32)


@dataclass(frozen=True)
class Asked:
    """What one request wants, and what it has said."""

    prompt: list[int]
    answer: list[int]
    row: Row
    repetition: float
    presence: float
    frequency: float
    biases: dict[int, float]
    bad: set[int]
    allowed: set[int] | None
    ends: bool

    @property
    def penalised(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


ASKED = st.builds(
    Asked,
    prompt=st.lists(tokens, min_size=1, max_size=8),
    answer=st.lists(tokens, max_size=8),
    row=st.builds(
        Row,
        temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.9]),
        top_k=st.sampled_from([0, 0, 1, 5, 30, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.0, 0.4, 0.93]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    ),
    repetition=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    presence=st.just(0.0) | numbers,
    frequency=st.just(0.0) | numbers,
    biases=st.dictionaries(tokens, st.floats(-9, 9, width=32), max_size=3),
    bad=st.sets(tokens, max_size=3),
    allowed=st.none() | st.sets(tokens, min_size=6),
    ends=st.booleans(),
)


def expected(logits: torch.Tensor, asked: Asked) -> torch.Tensor:
    """[V] as `generate` would have them before its warpers; presence and frequency penalty as the OpenAI API says."""
    said = torch.tensor([asked.prompt + asked.answer])
    scores = logits[None].float().clone()
    if asked.biases:
        scores = SequenceBiasLogitsProcessor({(t,): float(b) for t, b in asked.biases.items()})(said, scores)
    if asked.repetition != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(asked.repetition)(said, scores)
    for token in set(asked.answer):
        # In float32, as on the device: a tie that rounding makes or breaks decides which tokens top_k keeps.
        taken = torch.tensor(asked.frequency) * asked.answer.count(token) + torch.tensor(asked.presence)
        scores[0, token] -= taken
    if asked.bad:
        scores = NoBadWordsLogitsProcessor([[token] for token in sorted(asked.bad)])(said, scores)
    if asked.allowed is not None:
        allowed = sorted(asked.allowed)
        scores = PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(said, scores)
    if not asked.ends:
        least = MinNewTokensLengthLogitsProcessor(len(asked.prompt), len(asked.answer) + 1, EOS, device="cpu")
        scores = least(said, scores)
    return scores[0]


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def ours(logits: torch.Tensor, batch: list[Asked]) -> torch.Tensor:
    tables = PenaltyTables(InlineDevice(), VOCAB)
    with_penalties = [i for i, asked in enumerate(batch) if asked.penalised]
    places = list(range(len(with_penalties)))[::-1]  # another order than that of the samples
    for i, place in zip(with_penalties, places, strict=True):
        prompt, answer = (np.array(ids, np.int32) for ids in (batch[i].prompt, batch[i].answer))
        tables.load([PenaltyLoad(place, prompt, answer)])
    biases = [(i, token, bias) for i, asked in enumerate(batch) for token, bias in asked.biases.items()]
    biases += [(i, token, float("-inf")) for i, asked in enumerate(batch) for token in asked.bad]
    masks = [(i, pack_mask(sorted(asked.allowed), VOCAB)) for i, asked in enumerate(batch) if asked.allowed is not None]
    lengths = [len(batch[i].prompt) + len(batch[i].answer) for i in with_penalties]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(batch[i], name) for i in with_penalties], dtype=torch.float32)

    changes = ProcessorInputs(
        bias_samples=ints([i for i, _, _ in biases]),
        bias_tokens=ints([token for _, token, _ in biases]),
        bias_values=torch.tensor([bias for _, _, bias in biases], dtype=torch.float32),
        penalty_samples=ints(with_penalties),
        penalty_places=ints(places),
        penalty_lengths=ints(lengths),
        longest=max(lengths, default=0),
        repetition=column("repetition"),
        presence=column("presence"),
        frequency=column("frequency"),
        mask_samples=ints([i for i, _ in masks]),
        masks=torch.from_numpy(np.stack([mask for _, mask in masks])) if masks else ints([]).view(0, 0),
    )
    bans = [(i, EOS) for i, asked in enumerate(batch) if not asked.ends]
    return distribution(process(logits, changes, tables), inputs([asked.row for asked in batch], bans))


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(ASKED, min_size=1, max_size=5),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_equals_transformers(batch: list[Asked], seed: int, dtype: Any) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.to(getattr(torch, dtype))
    rows = [expected(logits[i], asked) for i, asked in enumerate(batch)]
    assume(all(bool(row.isfinite().any()) for row in rows))
    assume(not any(is_a_near_miss(row, asked.row) for row, asked in zip(rows, batch, strict=True)))
    got = ours(logits, batch)
    for row, asked, spread in zip(rows, batch, got, strict=True):
        torch.testing.assert_close(spread, reference(row, asked.row), rtol=0, atol=1e-5)
