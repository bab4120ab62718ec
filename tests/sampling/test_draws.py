"""The token that is drawn: follows the distribution, is always an allowed one, and is the row's own business."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cbengine.execution import sampler
from cbengine.execution.noise import uniforms
from cbengine.execution.sampler import distribution, sample, warm_up
from tests.sampling.rows import GREEDY, LAST_UNIFORM, Row, inputs


def noise(n: int, seed: int = 0) -> list[float]:
    return uniforms(np.full(n, seed, np.uint64), np.arange(n)).tolist()


def random_row(rng: random.Random) -> Row:
    return Row(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 40, 400, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.3, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        uniform=rng.choice([0.0, LAST_UNIFORM, *noise(8, rng.randrange(2**32))]),
    )


@pytest.mark.parametrize(
    "row", [Row(temperature=0.9), Row(0.8, 30, 0.9, 0.02), Row(top_p=0.95)], ids=["plain", "all filters", "long tail"]
)
def test_many_draws_follow_the_distribution(row: Row) -> None:
    n, vocab = 100_000, 80
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    s = inputs([row])
    expected = distribution(logits, s)[0] * n
    for name in ("temperature", "top_k", "top_p", "min_p"):
        setattr(s, name, getattr(s, name).expand(n))
    s.uniform = torch.from_numpy(uniforms(np.full(n, 7, np.uint64), np.arange(n)))
    counts = torch.bincount(sample(logits.expand(n, vocab), s).long(), minlength=vocab).double()
    assert counts.sum() == n
    assert counts[expected == 0].sum() == 0
    # Pearson's statistic, over the tokens that are likely enough for it and the others taken together.
    likely = expected >= 10
    rest = (expected[~likely].sum(), counts[~likely].sum())
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    bins = int(likely.sum())
    if rest[0] > 0:
        statistic, bins = statistic + (rest[1] - rest[0]) ** 2 / rest[0], bins + 1
    # Mean bins - 1, standard deviation sqrt(2 (bins - 1)): four of them is a chance of about one in 10,000.
    assert float(statistic) < bins - 1 + 4 * (2 * (bins - 1)) ** 0.5


def test_the_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)) * 2
    numbers = noise(200)
    rows = [Row(top_k=1000, uniform=u) for u in numbers]
    cumulative = distribution(logits, inputs(rows[:1]))[0].cumsum(-1)
    expected = torch.searchsorted(cumulative, torch.tensor(numbers, dtype=torch.float64), right=True)
    assert torch.equal(sample(logits.expand(200, -1), inputs(rows)).long(), expected)


@pytest.mark.parametrize("vocab", [33, 1000, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_in_any_crowd(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    monkeypatch.setattr(sampler, "_CHUNK", 4 * vocab)  # cut crowds in several places
    for _ in range(8):
        logits = (torch.randn(1, vocab, generator=generator) * rng.choice([0.5, 3.0])).to(dtype)
        row = random_row(rng)
        alone, spread = sample(logits, inputs([row])), distribution(logits, inputs([row]))
        for size in (2, 5, 11):
            at = rng.randrange(size)
            crowd = [random_row(rng) for _ in range(size)]
            crowd[at] = row
            others = (torch.randn(size, vocab, generator=generator) * 3).to(dtype)
            others[at] = logits[0]
            s = inputs(crowd, banned=[(i, rng.randrange(vocab)) for i in range(size) if i != at])
            assert torch.equal(sample(others, s)[at], alone[0])
            assert torch.equal(distribution(others, s)[at], spread[0])


def test_a_row_draws_the_same_with_any_number_of_threads() -> None:
    rng = random.Random(3)
    logits = torch.randn(6, 50_257, generator=torch.Generator().manual_seed(3))
    s = inputs([random_row(rng) for _ in range(6)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = distribution(logits, s)
        torch.set_num_threads(2)
        assert torch.equal(distribution(logits, s), one)
    finally:
        torch.set_num_threads(before)


def test_greedy_is_argmax_among_random_rows_too() -> None:
    rng = random.Random(4)
    for vocab in (1, 7, 512, 513, 5000):
        # Few levels: the largest is met many times, and the lowest index has to win.
        logits = torch.randint(0, 3, (20, vocab), generator=torch.Generator().manual_seed(vocab)).float() - 2
        rows = [GREEDY if i % 2 else random_row(rng) for i in range(20)]
        expected = logits.argmax(-1).int()
        assert torch.equal(sample(logits, inputs(rows))[1::2], expected[1::2])
        assert torch.equal(sample(logits.bfloat16(), inputs([GREEDY] * 20)), expected)


def test_only_allowed_tokens_at_both_ends_of_the_uniform() -> None:
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    for vocab in (3, 600, 5000):
        logits = torch.randn(40, vocab, generator=generator)
        logits[torch.rand(40, vocab, generator=generator) < 0.5] = -torch.inf
        logits[:, vocab // 2] = 0.25
        logits[::2, -1] = -torch.inf  # nothing is allowed after the last one that is
        logits[::3, 0] = -torch.inf
        rows = [random_row(rng) for _ in range(40)]
        for uniform in (0.0, 2.0**-24, LAST_UNIFORM, 1.0):  # 1.0 is not to come, and does no harm
            s = inputs([Row(r.temperature, r.top_k, r.top_p, r.min_p, uniform) for r in rows])
            tokens = sample(logits, s).long()
            assert bool((distribution(logits, s).gather(1, tokens[:, None]) > 0).all())
            assert bool(logits.gather(1, tokens[:, None]).isfinite().all())


def test_bans() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0, 2.0]]).repeat(3, 1)
    before = logits.clone()
    rows = [GREEDY, Row(top_k=1), GREEDY]
    # Pairs that are not in the batch are padding; a pair may come twice.
    bans = [(0, 1), (1, 1), (1, 2), (1, 2), (-1, 0), (3, 3), (2, -1), (2, 4), (0, 99)]
    assert sample(logits, inputs(rows, bans)).tolist() == [2, 3, 1]
    assert sample(logits, inputs([GREEDY] * 3, bans)).tolist() == [2, 3, 1]
    assert distribution(logits, inputs(rows, bans)).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert torch.equal(logits, before)


def test_bans_come_before_the_filters() -> None:
    """The banned token counts neither as one of the k, nor for the mass of top_p, nor as the most likely of min_p."""
    logits = torch.tensor([[9.0, 2.0, 1.0, 0.0]])
    without = torch.tensor([[-torch.inf, 2.0, 1.0, 0.0]])
    for row in (Row(top_k=2), Row(top_p=0.8), Row(min_p=0.3), Row(0.5, 2, 0.9, 0.1)):
        assert torch.equal(distribution(logits, inputs([row], [(0, 0)])), distribution(without, inputs([row])))


def test_a_ban_in_a_batch_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_CHUNK", 8)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(7, 1)
    bans = [(5, 3), (2, 3), (2, 2)]
    for rows in ([GREEDY] * 7, [Row(top_p=0.0)] * 7):
        assert sample(logits, inputs(rows, bans)).tolist() == [3, 3, 1, 3, 3, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("whole_row", [False, True])
def test_rows_without_a_distribution(bad: float, whole_row: bool) -> None:
    """They get the index that torch.argmax gives, and their neighbours what they get without them."""
    rng = random.Random(6)
    logits = torch.randn(24, 600, generator=torch.Generator().manual_seed(6))
    rows = [random_row(rng) for _ in range(24)]
    s = inputs(rows)
    expected = sample(logits, s)
    spoilt = logits.clone()
    spoilt[::2, (0 if whole_row else 400) :] = bad
    got = sample(spoilt, s)
    assert torch.equal(got[1::2], expected[1::2])
    assert bool(((got >= 0) & (got < 600)).all())
    if whole_row or bad != -float("inf"):
        assert torch.equal(got[::2], spoilt[::2].argmax(-1).int())
        assert torch.equal(distribution(spoilt, s)[::2].argmax(-1), spoilt[::2].argmax(-1))
    assert torch.equal(distribution(spoilt, s).sum(-1).round(decimals=9), torch.ones(24, dtype=torch.float64))


def test_no_rows_and_rows_of_a_wider_tensor() -> None:
    assert sample(torch.zeros(0, 10), inputs([])).shape == (0,)
    assert distribution(torch.zeros(0, 10), inputs([])).shape == (0, 10)
    wide = torch.randn(3, 1000, generator=torch.Generator().manual_seed(8))
    rows = [GREEDY, Row(top_k=5), Row(top_p=0.9)]
    part = wide[:, 100:700]
    assert torch.equal(sample(part, inputs(rows)), sample(part.contiguous(), inputs(rows)))
    assert torch.equal(sample(part, inputs([GREEDY] * 3)).long(), part.argmax(-1))


def test_the_global_generator_is_not_touched() -> None:
    before = torch.random.get_rng_state()
    sample(torch.randn(2, 100, generator=torch.Generator()), inputs([Row(), Row(0.7, 5, 0.9, 0.1)]))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawing_once_in_every_way(dtype: torch.dtype) -> None:
    warm_up(300, dtype, torch.zeros(1))
