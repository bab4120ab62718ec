"""The device draws what the CPU draws, from the same logits, with all parameters mixed in one batch."""

from __future__ import annotations

import random

import pytest
import torch

from cbengine.execution.inputs import SamplingInputs
from cbengine.execution.sampler import _sample_fused, distribution, sample
from tests.gpu.card import Card
from tests.sampling.rows import GREEDY, LAST_UNIFORM, Row, inputs, is_a_near_miss

pytestmark = pytest.mark.gpu


def draw(card: Card, logits: torch.Tensor, given: SamplingInputs) -> torch.Tensor:
    """On the device; on a dry run by the kernels that it has."""
    return _sample_fused(logits, given) if card.dry else sample(logits, given)


def mixed_rows(count: int, rng: random.Random) -> list[Row]:
    rows = [GREEDY, Row(uniform=0.0), Row(uniform=LAST_UNIFORM), Row(top_k=1), Row(top_p=0.0), Row(min_p=1.0)]
    while len(rows) < count:
        rows.append(
            Row(
                temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
                top_k=rng.choice([0, 0, 5, 40, 3000]),
                top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
                min_p=rng.choice([0.0, 0.0, 0.05]),
                uniform=rng.random(),
            )
        )
    return rows[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [2100, 32000, 151936])
def test_tokens_are_the_cpus(card: Card, vocab: int, dtype: torch.dtype) -> None:
    """Where one differs, the draw, or what is kept, was within the rounding of one exponential of the other token."""
    vocab = card.size(vocab, 2100)
    rows = mixed_rows(card.size(96, 8), random.Random(vocab))
    logits = (3 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(1))).to(dtype)
    banned = [(0, int(logits[0].argmax())), (3, int(logits[3].argmax())), (-1, 0), (0, vocab)]
    given = inputs(rows, banned)
    expected = sample(logits, given).tolist()
    moved = logits.to(card.device), card.move(given)
    draw(card, *moved)  # compiles
    with card.no_waiting():
        drawn = draw(card, *moved)
    assert drawn.dtype == torch.int32
    found = drawn.tolist()
    differing = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    bounds = distribution(logits, given).cumsum(-1)
    for i in differing:
        low, high = sorted((found[i], expected[i]))
        edges = bounds[i, low:high]
        at_an_edge = bool(((edges - rows[i].uniform).abs() < 1e-5).any())
        assert at_an_edge or is_a_near_miss(logits[i], rows[i], 1e-5), (rows[i], found[i], expected[i])
    assert len(differing) <= len(rows) // 16


@pytest.mark.parametrize("kind", ["greedy", "plain", "mixed"])
def test_a_row_draws_the_same_alone(card: Card, kind: str) -> None:
    rng = random.Random(5)
    rows = {
        "greedy": [GREEDY] * 6,
        "plain": [Row(uniform=rng.random()) for _ in range(6)],
        "mixed": mixed_rows(12, rng),
    }[kind]
    logits = 2 * torch.randn(len(rows), card.size(32000, 2100), generator=torch.Generator().manual_seed(2))
    together = draw(card, logits.to(card.device), card.move(inputs(rows))).tolist()
    for i in range(0, len(rows), card.size(1, 5)):
        alone = draw(card, logits[i : i + 1].to(card.device), card.move(inputs([rows[i]])))
        assert alone.tolist() == [together[i]]


def test_rows_without_a_distribution_stay_inside(card: Card) -> None:
    vocab = 2100
    logits = torch.zeros(4, vocab)
    logits[0, 7], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
    found = draw(card, logits.to(card.device), card.move(inputs([Row(uniform=0.4)] * 4))).tolist()
    assert found[:3] == [7, 9, 0] and 0 <= found[3] < vocab
