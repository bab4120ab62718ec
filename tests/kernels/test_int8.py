"""Products of small integers, against the same in plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.kernels.matrix import PackedMatrix
from cbengine.kernels.reference import INT8_GROUP, int8_linear, int8_rows, int8_weight
from tests.kernels.variants import NAMES, variant

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu}
ROWS = [1, 2, 3, 5, 8, 14, 15, 29, 127, 150]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def whole(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=generator).float()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=30)
def test_what_is_exact_in_integers_is_exact(name: str, data: st.DataObject) -> None:
    """Weights and activations that are whole numbers times a power of two, the largest being 127: nothing may be rounded."""
    depth, n = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 150))
    rows = data.draw(st.sampled_from(ROWS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    x, weight = whole(generator, rows, depth), whole(generator, n, depth)
    # Every sum stays below 2^24 in units of the least power of two, whatever the order: only so is float32 exact too.
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.1, x, (x / 40).round())
    x[:, ::INT8_GROUP], weight[:, 0] = 127.0, -127.0
    powers = torch.randint(0, 2, (rows, -(-depth // INT8_GROUP)), generator=generator).float().exp2()
    x *= powers.repeat_interleave(INT8_GROUP, dim=1)[:, :depth]
    weight *= torch.randint(-8, 8, (n, 1), generator=generator).float().exp2()
    out = PackedMatrix(variant(name), [weight], int8=True).product(x)
    assert torch.equal(out.double(), x.double() @ weight.double().T)
    assert torch.equal(out, int8_linear(x, weight))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=30)
def test_any_product(name: str, data: st.DataObject) -> None:
    depth, gated = data.draw(st.integers(1, 700)), data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3))
    sizes = [sizes[0]] * 2 if gated else sizes
    rows = data.draw(st.sampled_from(ROWS))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    weights = [torch.randn(n, depth, generator=generator) for n in sizes]
    biases = [torch.randn(n, generator=generator) if data.draw(st.booleans()) else None for n in sizes]
    activation = data.draw(st.sampled_from(list(ACTIVATIONS))) if gated else "none"
    x = torch.randn(rows, depth, generator=generator) * 10 ** data.draw(st.floats(-3, 3))

    matrix = PackedMatrix(variant(name), weights, biases, gated=gated, int8=True)
    out = matrix.product(x, activation)

    parts = [int8_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    expected = ACTIVATIONS[activation](parts[0]) * parts[1] if gated else torch.cat(parts, 1)
    scale = max(1e-3, float(expected.abs().max()))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6 * scale)
    for kept, weight in zip(matrix.unpack(), weights, strict=True):
        codes, scales = int8_weight(weight)
        assert torch.equal(kept, codes * scales)
    assert matrix.nbytes <= (depth + 12) * (sum(sizes) + 2 * variant(name).width)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(name: str) -> None:
    """Bit by bit, whichever tiles and tasks its computation is made of."""
    generator = torch.Generator().manual_seed(1)
    matrix = PackedMatrix(variant(name), [torch.randn(133, 720, generator=generator)], int8=True)
    x = torch.randn(300, 720, generator=generator)
    torch.set_num_threads(1)
    out = matrix.product(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(matrix.product(x), out)
        for first, count in [(0, 1), (7, 2), (13, 3), (100, 14), (101, 16), (50, 127), (3, 40), (9, 6)]:
            assert torch.equal(matrix.product(x[first : first + count]), out[first : first + count])


def test_every_build_computes_the_same_integers() -> None:
    """One row that is 1 in one place shows the integers that activations become, and their scale."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 100, generator=generator) * 100
    x[3] = 0
    x[4, 5] = 1e-31
    x[5, :64] = 0.5
    rows, scales = int8_rows(x)
    expected = (rows * scales[..., None]).flatten(1)[:, :100]
    for name in NAMES:
        found = PackedMatrix(variant(name), [torch.eye(100)], int8=True).product(x)
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_no_numbers_are_kept_apart(name: str) -> None:
    """In an activation they spoil their row and no other; in a weight they are refused."""
    matrix = PackedMatrix(variant(name), [torch.ones(3, 130)], int8=True)
    x = torch.ones(4, 130)
    x[0, 129], x[1, 3], x[3, 64] = math.nan, math.inf, -math.inf
    out = matrix.product(x)
    assert out[[0, 1, 3]].isnan().all()
    torch.testing.assert_close(out[2], torch.full((3,), 130.0))
    for wrong in (math.nan, math.inf, -math.inf):
        weight = torch.ones(3, 130)
        weight[1, 7] = wrong
        with pytest.raises(ValueError, match="infinite or not a number"):
            PackedMatrix(variant(name), [weight], int8=True)


def test_empty_and_strided_inputs() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = PackedMatrix(variant("native"), [torch.randn(20, 40, generator=generator)], int8=True)
    x = torch.randn(6, 100, generator=generator)
    assert torch.equal(matrix.product(x[:, 30:70]), matrix.product(x[:, 30:70].contiguous()))
    assert matrix.product(x[:0, 30:70]).shape == (0, 20)
    assert torch.equal(
        PackedMatrix(variant("native"), [torch.zeros(5, 40)], int8=True).product(x[:, :40]), torch.zeros(6, 5)
    )


def test_the_quality_is_that_of_eight_bits() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, x = torch.randn(50, 512, generator=generator), torch.randn(30, 512, generator=generator)
    x[:, 17] *= 60  # an outlier costs its own group alone; with one scale for a row the error would be over 0.1
    exact = x @ weight.T
    found = PackedMatrix(variant("native"), [weight], int8=True).product(x)
    assert (found - exact).norm() / exact.norm() < 0.03
