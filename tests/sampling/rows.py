"""Batches for the sampler made by hand, and what transformers' own processors make of the same row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbengine.execution.inputs import SamplingInputs

LAST_UNIFORM = 1.0 - 2.0**-24
"""The largest number that the engine ever draws with."""


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5


GREEDY = Row(temperature=0.0)


def inputs(rows: Sequence[Row], banned: Sequence[tuple[int, int]] = ()) -> SamplingInputs:
    """What the engine's batch filler makes of `rows`, with (row, token) pairs that are banned."""
    random = [row for row in rows if row.temperature > 0]
    return SamplingInputs(
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float32),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float32),
        uniform=torch.tensor([row.uniform for row in rows], dtype=torch.float32),
        banned_rows=torch.tensor([row for row, _ in banned], dtype=torch.int32),
        banned_tokens=torch.tensor([token for _, token in banned], dtype=torch.int32),
        any_random=bool(random),
        any_top_k=any(row.top_k > 0 for row in random),
        any_top_p=any(row.top_p < 1 for row in random),
        any_min_p=any(row.min_p > 0 for row in random),
    )


def reference(logits: Tensor, row: Row) -> Tensor:
    """float64 [V]: what `generate` would sample from for these logits [V].

    TopPLogitsWarper sorts with `torch.sort`, which leaves open what order tokens of equal score come in and so which of
    them survive; it is given the stable order here, the one that torch itself takes where it has no faster sort.
    """
    scores = logits[None].float()
    if row.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), logits.shape[0])[0].double()
    ids = torch.LongTensor([[0]])
    scores = TemperatureLogitsWarper(row.temperature)(ids, scores)
    if row.top_k:
        scores = TopKLogitsWarper(row.top_k)(ids, scores)
    if row.top_p < 1:
        with mock.patch.object(torch, "sort", functools.partial(torch.sort, stable=True)):
            scores = TopPLogitsWarper(row.top_p)(ids, scores)
    if row.min_p:
        scores = MinPLogitsWarper(row.min_p)(ids, scores)
    return torch.softmax(scores, -1)[0].double()


def is_a_near_miss(logits: Tensor, row: Row, margin: float = 2e-6) -> bool:
    """Whether a token of [V] is so close to being kept or not that the rounding of a float32 decides."""
    if row.temperature == 0:
        return False
    scores = (logits.float() / row.temperature).double()
    if row.top_k:
        kth = scores.topk(min(row.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    probabilities = torch.softmax(scores, -1)
    mass = probabilities.sort(descending=True).values.cumsum(-1)
    near_p = 0 < row.top_p < 1 and bool(((mass - row.top_p).abs() < margin).any())
    ratio = probabilities / probabilities.max()
    near_min_p = 0 < row.min_p < 1 and bool(((ratio / row.min_p - 1).abs() < margin).any())
    return near_p or near_min_p
