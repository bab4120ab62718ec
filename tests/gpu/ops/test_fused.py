"""The fused Triton kernels, compiled for this device, against plain torch on it."""

from __future__ import annotations

import itertools

import pytest
import torch

from cbengine.kernels.decoder import Activation
from cbengine.kernels.triton.activation import gated, gated_reference
from cbengine.kernels.triton.norm import RowNorm, join, join_reference
from cbengine.kernels.triton.rope import (
    Heads,
    kv_slots,
    kv_slots_reference,
    rotate_and_write,
    rotate_and_write_reference,
)
from tests.attention.packing import Work, step
from tests.gpu.card import Card

pytestmark = pytest.mark.gpu

KINDS = {"llama": {"round_first": True}, "gemma": {"shift": True}, "olmo2": {}, "olmo": {"center": True}}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
"""One or two units in the last place, where sums in another order decide how something is rounded."""
DTYPES = [torch.float32, torch.bfloat16]


def noise(card: Card, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(card.device)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    bound = CLOSE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [20, 4096])
def test_norms(card: Card, width: int, kind: str, dtype: torch.dtype) -> None:
    width, rows = card.size(width, 20), card.size(300, 3)
    residual, x = (
        noise(card, rows, width, dtype=dtype, seed=1),
        noise(card, rows, width + 8, dtype=dtype, seed=2)[:, :width],
    )

    def norm(seed: int) -> RowNorm:
        return RowNorm(None if kind == "olmo" else noise(card, width, dtype=dtype, seed=seed), 1e-5, **KINDS[kind])

    for after, before in itertools.product((norm(3), None), (norm(4), None)):
        for one, other in zip(
            join(residual, x, after, before), join_reference(residual, x, after, before), strict=True
        ):
            check(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", Activation)
def test_gated(card: Card, kind: Activation, dtype: torch.dtype) -> None:
    gate_up = 3 * noise(card, card.size(300, 3), 2 * card.size(14336, 1100), dtype=dtype)
    check(gated(gate_up, kind), gated_reference(gate_up, kind))


@pytest.mark.parametrize("page", [16, 24, 256])
def test_where_tokens_go(card: Card, page: int) -> None:
    works = [
        Work(c, n, range(2, 3 + c // page)) for c, n in [(700, 1), (1, 1), (0, 1), (30, 30), (513, 200), (256, 256)]
    ]
    inputs = card.move(step(works[:3], works[3:], padded_tokens=5))
    for found, expected in zip(kv_slots(inputs, page), kv_slots_reference(inputs, page), strict=True):
        assert found.tolist() == expected.tolist()


# Queries, keys, size of a head, elements that are rotated.
SHAPES = {"llama": (32, 8, 128, 128), "gemma": (4, 1, 256, 256), "odd": (3, 1, 80, 80), "partial": (8, 8, 64, 32)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [None, "llama", "gemma"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_writes(card: Card, shape: str, kind: str | None, dtype: torch.dtype) -> None:
    queries, keys, dim, rotary = card.size(SHAPES[shape], (4, 2, 16, 16))
    tokens, page = card.size(200, 4), 16

    def norm(seed: int) -> RowNorm | None:
        return None if kind is None else RowNorm(noise(card, dim, dtype=dtype, seed=seed), 1e-6, **KINDS[kind])

    heads = Heads(queries, keys, dim, norm(1), norm(2))
    qkv = noise(card, tokens, (queries + 2 * keys) * dim, dtype=dtype, seed=3)
    angles = torch.rand(tokens, rotary, generator=torch.Generator().manual_seed(4)).to(card.device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = noise(card, 3 + tokens // page, 3, 2, page, keys, dim, dtype=dtype, seed=6)
    places = torch.randperm((pool.shape[0] - 2) * page, generator=torch.Generator().manual_seed(7))[:tokens].int()
    blocks, offsets = (places // page + 2).to(card.device), (places % page).to(card.device)
    ours, theirs = pool.clone(), pool.clone()
    found = rotate_and_write(qkv, cos, sin, heads, ours[:, 1, 0], ours[:, 1, 1], blocks, offsets)
    expected = rotate_and_write_reference(qkv, cos, sin, heads, theirs[:, 1, 0], theirs[:, 1, 1], blocks, offsets)
    check(found, expected)
    check(ours, theirs)
    assert torch.equal(ours[:, [0, 2]], pool[:, [0, 2]])
