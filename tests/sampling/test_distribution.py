"""The distribution that a row is drawn from is the one that transformers' processors give."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbengine.execution import sampler
from cbengine.execution.sampler import distribution
from tests.sampling.rows import GREEDY, Row, inputs, is_a_near_miss, reference

# Sizes on both sides of the number of candidates that are looked at first, of one block, and of two.
VOCABS = [1, 2, 3, 17, 255, 256, 257, 300, 700, 1300]
SHARES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0, width=32))
ROWS = st.one_of(
    st.just(GREEDY),
    st.builds(
        Row,
        temperature=st.sampled_from([0.25, 0.7, 1.0, 1.5, 4.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 20, 256, 257, 500, 2**31 - 1]),
        top_p=SHARES,
        min_p=st.one_of(st.just(0.0), SHARES),
    ),
)


def some_logits(kind: str, vocab: int, seed: int) -> Tensor:
    """[V] of one kind; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(vocab, generator=generator) * 3
    if kind == "bfloat16":  # ties, and another dtype
        return normal.bfloat16()
    if kind == "float16":
        return normal.half()
    if kind == "levels":  # nothing but ties
        return torch.randint(0, 4, (vocab,), generator=generator).float()
    if kind == "equal":
        return torch.full((vocab,), 1.5)
    if kind == "zeros":  # of both signs: they tie
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "holes":
        holes = normal.masked_fill(torch.rand(vocab, generator=generator) < 0.4, -torch.inf)
        holes[seed % vocab] = 1.0
        return holes
    return normal


KINDS = ["normal", "bfloat16", "float16", "levels", "equal", "zeros", "holes"]


@given(
    rows=st.lists(ROWS, min_size=1, max_size=6),
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=250)
def test_equals_transformers_row_by_row(rows: list[Row], kind: str, vocab: int, seed: int) -> None:
    logits = torch.stack([some_logits(kind, vocab, seed + i) for i in range(len(rows))])
    assume(not any(is_a_near_miss(line, row) for line, row in zip(logits, rows, strict=True)))
    ours = distribution(logits, inputs(rows))
    theirs = torch.stack([reference(line, row) for line, row in zip(logits, rows, strict=True)])
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.sum(-1), torch.ones(len(rows), dtype=torch.float64), rtol=0, atol=1e-12)
    # Also for tokens that are too unlikely to show above: the same ones are kept, the same ones are not.
    assert bool((ours[theirs > 1e-9] > 0).all())
    assert bool((ours[theirs == 0] == 0).all())


@given(
    rows=st.lists(ROWS, min_size=1, max_size=5),
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_the_way_for_other_devices_agrees_to_the_bit(rows: list[Row], kind: str, vocab: int, seed: int) -> None:
    logits = torch.stack([some_logits(kind, vocab, seed + i) for i in range(len(rows))])
    s = inputs(rows)
    expected = distribution(logits, s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_host_may_look", lambda _: False)
        assert torch.equal(distribution(logits, s), expected)


def test_sums_of_weights_are_exact() -> None:
    """In whatever order and grouping they are made: what the independence of the batch stands on."""
    for vocab, scale in ((1, 1.0), (1000, 3.0), (50_257, 0.1), (151_936, 3.0)):
        logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
        weights = sampler._weigh(logits, logits.argmax(-1), inputs([Row(), Row()]))
        assert float(weights[0].sum()) == math.fsum(weights[0].tolist())
        assert torch.equal(weights.flip(-1).cumsum(-1)[:, -1], weights.sum(-1))
        assert float(weights.max()) == 1.0


@pytest.mark.parametrize("vocab", [100, 50_257])
def test_other_devices_are_never_waited_for(vocab: int) -> None:
    """A meta tensor has no values: any look at one by the host, or a shape that depends on one, raises."""
    rows = [Row(0.8, 50, 0.9, 0.05), Row(1.0, 0, 0.9, 0.0), GREEDY, Row(1.0, 1000, 1.0, 0.0)]
    s = inputs(rows, banned=[(0, 3), (2, 7)])
    on_device = replace(
        s, **{f.name: getattr(s, f.name).to("meta") for f in fields(s) if not f.name.startswith("any_")}
    )
    tokens = sampler.sample(torch.empty(len(rows), vocab, dtype=torch.bfloat16, device="meta"), on_device)
    assert (tokens.device.type, tokens.dtype, tokens.shape) == ("meta", torch.int32, (len(rows),))


def test_top_p_keeps_as_few_tokens_as_reach_it() -> None:
    """Exactly: also where p has no exact float32 and the mass of the tokens no exact sum of float32s."""
    for vocab in (2, 5, 10, 20, 25, 50, 100):
        for kept in range(1, vocab + 1):
            got = distribution(torch.zeros(1, vocab), inputs([Row(top_p=kept / vocab)]))
            assert int((got > 0).sum()) == kept
    for kept in (255, 256, 257):  # as many as there are candidates, of more that tie
        got = distribution(torch.zeros(1, 1000), inputs([Row(top_p=kept / 1000)]))
        assert int((got > 0).sum()) == kept


def test_top_p_0_keeps_one_token_and_1_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 2)
    got = distribution(logits, inputs([Row(top_p=0.0), Row(top_p=1.0)]))
    assert got[0].tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(got[1], torch.softmax(logits[1].double(), -1), rtol=0, atol=1e-7)


def test_top_k_around_the_number_of_candidates() -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    logits = (order.float() / 100)[None]
    for k in (1, 2, 255, 256, 257, 258, 999, 1000, 1001):
        got = distribution(logits, inputs([Row(top_k=k)]))[0]
        assert torch.equal(got > 0, order >= 1000 - k)


def test_ties_with_the_kth_stay() -> None:
    got = distribution(torch.tensor([[5.0, 4.0, 4.0, 4.0, 1.0]]), inputs([Row(top_k=2)]))
    assert (got[0] > 0).tolist() == [True, True, True, True, False]


def test_ties_of_which_only_some_are_candidates() -> None:
    """The k-th largest score is met, and top_p reached, among tokens that tie far beyond the candidates."""
    logits = torch.zeros(2, 5000)
    logits[:, :100] = 1.0
    got = distribution(logits, inputs([Row(top_k=101), Row(top_p=0.5)]))
    assert int((got[0] > 0).sum()) == 5000
    expected = reference(logits[1], Row(top_p=0.5))
    torch.testing.assert_close(got[1], expected, rtol=0, atol=1e-7)
    assert torch.equal(got[1] > 0, expected > 0)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e6, 3.4e38])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[60.0, 61.0, -60.0, 61.0, -torch.inf]])
    got = distribution(logits, inputs([Row(temperature=temperature)]))[0]
    # Near 0 the two best tokens share everything, at the other end all tokens that are allowed do.
    expected = torch.tensor(
        [0, 0.5, 0, 0.5, 0] if temperature < 1 else [0.25, 0.25, 0.25, 0.25, 0], dtype=torch.float64
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
