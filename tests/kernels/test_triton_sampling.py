"""The sampling kernels, in Triton's interpreter, against the sampler in torch: the same token for every row."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from cbengine.execution.sampler import _sample_fused, has_kernels_for, sample
from tests.sampling.rows import GREEDY, LAST_UNIFORM, Row, inputs

VOCAB = 2100  # three blocks, the last of them partly filled
KINDS = {
    "greedy": [GREEDY],
    "plain": [Row(), Row(temperature=0.3), GREEDY],
    "min_p": [Row(min_p=0.2), Row(min_p=1.0), Row(), GREEDY],
    "top": [Row(top_k=5), Row(top_p=0.7), Row(top_k=40, top_p=0.4, min_p=0.1), Row(), GREEDY],
}


def rows_of(kind: str, rng: random.Random) -> list[Row]:
    return [
        Row(row.temperature, row.top_k, row.top_p, row.min_p, uniform)
        for row in KINDS[kind]
        for uniform in (rng.random(), LAST_UNIFORM)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_samplers(kind: str, dtype: torch.dtype) -> None:
    """In float16 many scores tie."""
    rows = rows_of(kind, random.Random(1))
    logits = (3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(2))).to(dtype)
    before, s = logits.clone(), inputs(rows)
    found = _sample_fused(logits, s)
    assert found.dtype == torch.int32 and found.tolist() == sample(logits, s).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("row", [GREEDY, Row(uniform=0.3), Row(top_p=0.9)], ids=["greedy", "plain", "top_p"])
def test_banned_tokens_and_rows_without_a_distribution(row: Row) -> None:
    logits = torch.zeros(6, VOCAB)
    logits[0, 1500] = logits[0, 2099] = math.nan
    logits[1, [7, 1400]] = math.inf
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 2099] = -3e38
    logits[4, [1024, 2000]] = 30.0
    banned = [(4, 1024), (5, 0), (6, 0), (-1, 3), (0, VOCAB)]
    s = inputs([row] * 6, banned)
    with np.errstate(all="ignore"):  # inf - inf
        found = _sample_fused(logits, s).tolist()
    assert found == sample(logits, s).tolist()
    assert found[:2] == [1500, 7] and found[2] == 0 and found[3] == 2099 and found[4] == 2000 and found[5] != 0


def test_a_row_does_not_know_its_neighbours() -> None:
    rows = rows_of("top", random.Random(3))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(4))
    together = _sample_fused(logits, inputs(rows)).tolist()
    wide = torch.zeros(len(rows), 2 * VOCAB)  # rows that are parts of wider ones
    wide[:, ::2] = logits
    assert _sample_fused(wide[:, ::2], inputs(rows)).tolist() == together
    alone = [int(_sample_fused(logits[i : i + 1], inputs([rows[i]]))) for i in (1, 4, 7)]
    assert alone == [together[i] for i in (1, 4, 7)]


def test_no_rows_and_no_gpu() -> None:
    assert _sample_fused(torch.zeros(0, VOCAB), inputs([])).shape == (0,)
    assert not has_kernels_for(torch.zeros(1, VOCAB))
