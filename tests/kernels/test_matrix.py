"""Packed matrices: exact in every format, and products that depend on nothing but their operands."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.kernels.matrix import PackedMatrix
from tests.kernels.variants import NAMES, variant

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def coded(generator: torch.Generator, n: int, depth: int, kind: str) -> torch.Tensor:
    """Weights as a quantised checkpoint unpacks to them; `depth` is a multiple of 32."""
    groups = depth // 32

    def whole(low: int, high: int, count: int = 32) -> torch.Tensor:
        return torch.randint(low, high, (n, depth // count, count), generator=generator).float()

    scale = (torch.rand(n, groups, 1, generator=generator) * 0.02 + 1e-3).half().float()
    if kind == "Q4_0":
        q = whole(0, 16)
        q[..., 3] = 0
        return (scale * (q - 8)).view(n, depth)
    if kind == "Q4_1":
        q = whole(0, 16)
        q[..., 5], q[..., 20] = 0, 15
        return (scale * q + normal(generator, n, groups, 1).half().float()).view(n, depth)
    if kind == "Q5_0":
        q = whole(0, 32)
        q[..., 0] = 0
        return (scale * (q - 16)).view(n, depth)
    if kind == "Q8_0":
        q = whole(-127, 128)
        q[..., 31] = 127
        return (scale * q).view(n, depth)
    if kind == "Q4_K":  # scales and minima are products of half precision with six bits
        steps, minima = whole(1, 64, 32)[..., :1], whole(1, 64, 32)[..., :1]
        return (scale * steps * whole(0, 16) - (scale * 0.7).half().float() * minima).view(n, depth)
    assert kind == "Q6_K"  # groups of 16, six bits
    steps = whole(-128, 128, 16)[..., :1]
    steps[steps == 0] = 1
    return (scale[:, :1] * steps * (whole(0, 64, 16) - 32)).view(n, depth)


FORMATS = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "Q4_0": "4 bits in groups of 32",
    "Q4_1": "4 bits in groups of 32",
    "Q5_0": "8 bits in groups of 32",
    "Q8_0": "8 bits in groups of 32",
    "Q4_K": "4 bits in groups of 32",
    "Q6_K": "8 bits in groups of 16",
}


def weights_of(kind: str, generator: torch.Generator, n: int, depth: int) -> torch.Tensor:
    if kind == "bf16":
        return normal(generator, n, depth).bfloat16().float()
    if kind == "f16":
        return normal(generator, n, depth).half().float()
    if kind == "f32":
        return normal(generator, n, depth)
    return coded(generator, n, depth, kind)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_found_and_exact(name: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = weights_of(kind, generator, 70, 320)
    matrix = PackedMatrix(variant(name), [weight])
    assert matrix.format_name == FORMATS[kind]
    assert torch.equal(matrix.unpack()[0], weight)
    size = {"bfloat16": 2, "float16": 2, "float32": 4}.get(matrix.format_name, 2)
    assert matrix.nbytes <= size * 320 * (70 + variant(name).width)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40)
def test_any_product(name: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(FORMATS)))
    depth = data.draw(st.integers(1, 20)) * 32 if kind[0] == "Q" else data.draw(st.integers(1, 600))
    gated = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3))
    sizes = [sizes[0]] * 2 if gated else sizes
    rows = data.draw(st.sampled_from([0, 1, 2, 3, 5, 8, 14, 15, 29, 127, 260]))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    weights = [weights_of(kind, generator, n, depth) for n in sizes]
    biases = [normal(generator, n) if data.draw(st.booleans()) else None for n in sizes]
    activation = data.draw(st.sampled_from(list(ACTIVATIONS))) if gated else "none"
    matrix = PackedMatrix(variant(name), weights, biases, gated=gated)
    x = normal(generator, rows, depth)

    out = matrix.product(x, activation)

    parts = [
        F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    expected = ACTIVATIONS[activation](parts[0]) * parts[1] if gated else torch.cat(parts, 1)
    assert out.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if rows else 1.0
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * scale)
    assert all(torch.equal(a, b) for a, b in zip(matrix.unpack(), weights, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(name: str, kind: str) -> None:
    """Bit by bit, whichever tiles and tasks its computation is made of."""
    generator = torch.Generator().manual_seed(1)
    matrix = PackedMatrix(variant(name), [weights_of(kind, generator, 133, 576)])
    x = normal(generator, 300, 576)
    torch.set_num_threads(1)
    whole = matrix.product(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(matrix.product(x), whole)
        for first, count in [(0, 1), (7, 2), (13, 3), (100, 14), (101, 16), (50, 127), (3, 40)]:
            assert torch.equal(matrix.product(x[first : first + count]), whole[first : first + count])


def test_values_that_are_no_numbers_are_kept() -> None:
    weight = torch.zeros(4, 32)
    weight[0, 0], weight[1, 3], weight[2, 5] = math.nan, math.inf, -math.inf
    matrix = PackedMatrix(variant("native"), [weight])
    unpacked = matrix.unpack()[0]
    assert torch.equal(unpacked.isnan(), weight.isnan())
    assert torch.equal(unpacked.nan_to_num(), weight.nan_to_num())
    assert matrix.product(torch.ones(1, 32))[0, 0].isnan()


def test_rows_that_are_apart_in_memory() -> None:
    generator = torch.Generator().manual_seed(2)
    matrix = PackedMatrix(variant("native"), [normal(generator, 20, 40)])
    x = normal(generator, 6, 100)
    assert torch.equal(matrix.product(x[:, 30:70]), matrix.product(x[:, 30:70].contiguous()))
    columns = normal(generator, 40, 6).T
    assert torch.equal(matrix.product(columns), matrix.product(columns.contiguous()))


def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = PackedMatrix(variant("native"), [normal(generator, 400, 300)])
    inputs = [normal(generator, rows, 300) for rows in (1, 5, 40, 200)]
    expected = [matrix.product(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        torch.set_num_threads(1 + index % 3)
        for _ in range(30):
            if not torch.equal(matrix.product(inputs[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
