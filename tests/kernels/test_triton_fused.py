"""Fused Triton kernels against plain torch, in the interpreter; and compiled for GPUs, which needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.attention.base import write_index
from cbengine.cache.geometry import WRITE_BLOCK
from cbengine.kernels.decoder import Activation
from cbengine.kernels.triton.activation import gated, gated_reference
from cbengine.kernels.triton.norm import RowNorm, join, join_reference, norm
from cbengine.kernels.triton.rope import (
    Heads,
    kv_slots,
    kv_slots_reference,
    rotate_and_write,
    rotate_and_write_reference,
)
from tests.attention.packing import Work, step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {"llama": {"round_first": True}, "gemma": {"shift": True}, "olmo2": {}, "olmo": {"center": True}}
# One unit in the last place, or two where sums of squares differ in theirs and a rounding follows. In bfloat16 the interpreter
# cuts digits off where the device rounds (the same kernel's float16 shows that it rounds where torch does).
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-5, torch.float16: 2**-9}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, *, equal: float = 0.97) -> None:
    """Equal within rounding; in float16, where both round at the same places, nearly all are equal bit by bit."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    bound = CLOSE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    if found.dtype == torch.float16:
        assert (found == expected).float().mean() > equal


def row_norm(kind: str, width: int, dtype: torch.dtype, seed: int) -> RowNorm:
    weight = None if kind == "olmo" else random(width, dtype=dtype, seed=seed)
    return RowNorm(weight, 1e-5, **KINDS[kind])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norms(kind: str, dtype: torch.dtype) -> None:
    width = 20
    residual, x = random(3, width, dtype=dtype, seed=1), random(3, width + 5, dtype=dtype, seed=2)[:, :width]
    after, before = row_norm(kind, width, dtype, 3), row_norm(kind, width, dtype, 4)
    for a, b in ((after, before), (None, before), (after, None), (None, None)):
        for found, expected in zip(join(residual, x, a, b), join_reference(residual, x, a, b), strict=True):
            check(found, expected)
    check(norm(x, before), join_reference(None, x, None, before)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", Activation)
def test_gated(kind: Activation, dtype: torch.dtype) -> None:
    gate_up = 4 * random(3, 2 * 1100, dtype=dtype)  # more than one block of columns
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -9.0])
    with np.errstate(over="ignore"):  # of exp, for a gate far below 0
        found = gated(gate_up, kind)
    # torch's 1 + tanh(y) has few digits left where tanh nears -1.
    check(found, gated_reference(gate_up, kind), equal=0.85)


def slots_case() -> tuple[list[Work], list[Work]]:
    """Two sequences that decode, one padded, and two chunks; pages of 4."""
    return (
        [Work(6, 1, [5, 3]), Work(0, 1, []), Work(8, 1, [2, 9])],
        [Work(7, 3, [4, 6], [1, 2, 3]), Work(5, 5, [8, 7], [1, 2, 3, 4, 5])],
    )


def test_where_tokens_go() -> None:
    inputs = step(*slots_case(), padded_tokens=3)
    blocks, offsets = kv_slots(inputs, 4)
    expected = kv_slots_reference(inputs, 4)
    assert blocks.dtype == offsets.dtype == torch.int32
    assert blocks.tolist() == expected[0].tolist() and offsets.tolist() == expected[1].tolist()
    index = write_index(inputs, 4)
    assert blocks.tolist() == index[0].tolist() and offsets.tolist() == index[1].tolist()
    assert set(blocks[-3:].tolist()) == {WRITE_BLOCK}


@given(data=st.data())
@settings(max_examples=8)
def test_where_any_tokens_go(data: st.DataObject) -> None:
    page = data.draw(st.integers(1, 7))
    count = st.integers(1, 9)

    def work(counts: list[int]) -> list[Work]:
        return [
            Work(past + n, n, range(2, 3 + (past + n) // page))
            for n in counts
            for past in [data.draw(st.integers(0, 20))]
        ]

    decodes = work([1] * data.draw(st.integers(0, 4)))
    chunks = work(data.draw(st.lists(count, min_size=not decodes, max_size=3)))
    inputs = step(decodes, chunks, padded_tokens=data.draw(st.integers(0, 3)))
    for found, expected in zip(kv_slots(inputs, page), write_index(inputs, page), strict=True):
        assert found.tolist() == expected.tolist()


# Queries, keys, size of a head, elements that are rotated.
SHAPES = {"plain": (4, 2, 16, 16), "odd": (3, 1, 20, 20), "partial": (2, 2, 16, 8), "wide": (1, 1, 64, 64)}


@pytest.mark.parametrize("angles", ["as the model", "float32"])
@pytest.mark.parametrize("normed", [None, "llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rope(shape: str, dtype: torch.dtype, normed: str | None, angles: str) -> None:
    queries, keys, dim, rotary = SHAPES[shape]
    tokens, page = 5, 4
    q_norm = None if normed is None else row_norm(normed, dim, dtype, 1)
    k_norm = None if normed is None else row_norm(normed, dim, dtype, 2)
    heads = Heads(queries, keys, dim, q_norm, k_norm, clip=None if angles == "float32" else 1.5)
    qkv = random(tokens, (queries + 2 * keys) * dim, dtype=dtype, seed=3)
    angle_type = torch.float32 if angles == "float32" else dtype
    cos, sin = (1.2 * random(tokens, rotary, dtype=angle_type, seed=seed) for seed in (4, 5))
    pool = random(9, 3, 2, page, keys, dim, dtype=dtype, seed=6)  # other layers lie between the pages of ours
    blocks, offsets = torch.tensor([5, 1, 1, 8, 2], dtype=torch.int32), torch.tensor([0, 3, 1, 2, 2], dtype=torch.int32)
    ours, theirs = pool.clone(), pool.clone()
    found = rotate_and_write(qkv, cos, sin, heads, ours[:, 1, 0], ours[:, 1, 1], blocks, offsets)
    expected = rotate_and_write_reference(qkv, cos, sin, heads, theirs[:, 1, 0], theirs[:, 1, 1], blocks, offsets)
    check(found, expected)
    check(ours, theirs)
    untouched = torch.ones(9, 4, dtype=torch.bool)
    untouched[blocks.long(), offsets.long()] = False
    assert torch.equal(ours[:, [0, 2]], pool[:, [0, 2]])
    assert torch.equal(ours[:, 1].transpose(1, 2)[untouched], pool[:, 1].transpose(1, 2)[untouched])


SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
"""Bytes that one program can have on an A100 and an H200."""


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_compiled_for_gpus(which: str) -> None:
    script = Path(__file__).with_name("compile_fused.py")
    root = str(script.parents[2])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script), which],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {architecture for _, architecture, *_ in found} == ({90} if which == "few" else set(SHARED_MEMORY))
    assert {name.split()[0] for name, *_ in found} >= {"join", "rope", "slots", "gated", "sampling"}
    for name, architecture, shared, code, told_apart in found:
        assert code > 0 and shared <= SHARED_MEMORY[architecture], (name, architecture, shared)
        assert told_apart == [], (name, told_apart)  # nothing that varies from step to step is compiled in
