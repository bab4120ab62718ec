"""Every backend against the definition of attention in float64, over random packed steps and cache layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.attention import AttentionBackend, LayerKV
from cbengine.attention.cpu import CpuBackend
from cbengine.attention.eager import EagerBackend
from cbengine.attention.sdpa import SdpaBackend
from cbengine.cache.geometry import READ_BLOCK, WRITE_BLOCK
from tests.attention.packing import Work, step

BACKENDS = [CpuBackend, EagerBackend, SdpaBackend]
LAYOUTS = ["dense", "pool", "odd"]


@dataclass
class Case:
    """Sequences as (context, query tokens), (0, 1) being a padded one."""

    decodes: list[int]
    chunks: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    page_size: int = 4
    layout: str = "pool"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    padded_tokens: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0


def make_layer(case: Case, blocks: int) -> LayerKV:
    """A cache full of NaN, but for the reserved block that padding reads: what nobody wrote must not be read."""
    pages = (case.page_size, case.kv_heads, case.dim)
    if case.layout == "dense":
        key, value = torch.empty(blocks, *pages), torch.empty(blocks, *pages)
    elif case.layout == "pool":  # two layers in one pool, as the engine's cache is laid out
        pool = torch.empty(blocks, 2, 2, *pages)
        key, value = pool[:, 1, 0], pool[:, 1, 1]
    else:  # blocks with a gap that is no multiple of a token
        flat = torch.empty(2, blocks, math.prod(pages) + 3)
        key, value = (part[:, :-3].view(blocks, *pages) for part in flat)
    key.fill_(math.nan)[READ_BLOCK] = 0
    value.fill_(math.nan)[READ_BLOCK] = 0
    return LayerKV.of(key.to(case.dtype), value.to(case.dtype))


def by_definition(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None):
    """Attention of the last rows of one dense sequence, float64. Shapes [n, H, D] and [m, Hkv, D]."""
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(case.group, 0), v.repeat_interleave(case.group, 0)
    scores = q @ k.transpose(1, 2) * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    n, m = scores.shape[1:]
    for i in range(n):
        last = m - n + i
        scores[:, i, last + 1 :] = -math.inf
        if case.window is not None:
            scores[:, i, : max(0, last - case.window + 1)] = -math.inf
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights / total @ v).transpose(0, 1)


def check(case: Case, backend: AttentionBackend, tolerance: float = 2e-5) -> None:
    rng = np.random.default_rng(case.seed)
    torch_rng = torch.Generator().manual_seed(case.seed)
    sequences = [(context, 1) for context in case.decodes] + case.chunks
    needed = [-(-context // case.page_size) for context, _ in sequences]
    free = iter(rng.permutation(sum(needed) + 3) + 2)
    works = [Work(c, n, [int(next(free)) for _ in range(p)]) for (c, n), p in zip(sequences, needed, strict=True)]
    inputs = step(works[: len(case.decodes)], works[len(case.decodes) :], padded_tokens=case.padded_tokens)
    layer = make_layer(case, sum(needed) + 5)
    heads = case.kv_heads * case.group

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch_rng).to(case.dtype)

    query = normal(inputs.num_tokens, heads, case.dim)
    new_key, new_value = normal(2, inputs.num_tokens, case.kv_heads, case.dim)
    sinks = normal(heads) if case.sinks else None
    dense = []
    for work, start in zip(works, inputs.host_query_starts, strict=False):
        key, value = normal(2, work.context, case.kv_heads, case.dim)
        past = max(0, work.context - work.count)
        if work.context:
            key[past:] = new_key[start : start + work.count]
            value[past:] = new_value[start : start + work.count]
        for at in range(past):
            block, offset = work.blocks[at // case.page_size], at % case.page_size
            layer.key[block, offset], layer.value[block, offset] = key[at], value[at]
        dense.append((key, value))

    backend.begin(inputs, case.page_size)
    backend.write(layer, new_key, new_value)
    out = backend.attend(layer, query, scale=0.3, window=case.window, softcap=case.softcap, sinks=sinks)

    assert out.shape == query.shape
    assert out.dtype == query.dtype
    assert torch.isfinite(out).all()
    for work, start, (key, value) in zip(works, inputs.host_query_starts, dense, strict=False):
        if work.context:
            mine = slice(int(start), int(start) + work.count)
            expected = by_definition(case, query[mine], key, value, sinks)
            torch.testing.assert_close(out[mine].double(), expected, rtol=tolerance, atol=tolerance)
    check_pages(case, layer, works, dense)


def check_pages(case: Case, layer: LayerKV, works: list[Work], dense: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Every token is where its block table says, and nothing else was written, but for the block of padded writes."""
    written = torch.zeros(layer.key.shape[:2], dtype=torch.bool)
    written[READ_BLOCK] = True
    for work, (key, value) in zip(works, dense, strict=True):
        for at in range(work.context):
            block, offset = work.blocks[at // case.page_size], at % case.page_size
            assert torch.equal(layer.key[block, offset], key[at])
            assert torch.equal(layer.value[block, offset], value[at])
            written[block, offset] = True
    assert (layer.key[READ_BLOCK] == 0).all()
    assert (layer.value[READ_BLOCK] == 0).all()
    others = ~written
    others[WRITE_BLOCK] = False
    assert layer.key[others].isnan().all()
    assert layer.value[others].isnan().all()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contexts = st.integers(0, 40) | st.integers(60, 90)
    chunks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=3)
    decodes = draw(st.lists(contexts, max_size=6))
    pieces = [(past + count, count) for past, count in draw(chunks)]
    padding = draw(st.integers(0, 2))
    if draw(st.booleans()) or not (decodes or pieces):
        pieces += [(0, 1)] * (1 + padding)
    return Case(
        decodes=decodes,
        chunks=pieces,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([4, 8])),
        page_size=draw(st.sampled_from([4, 5, 16])),
        layout=draw(st.sampled_from(LAYOUTS)),
        window=draw(st.none() | st.integers(1, 40)),
        softcap=draw(st.none() | st.floats(0.5, 20)),
        sinks=draw(st.booleans()),
        padded_tokens=padding,
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
@settings(max_examples=60)
def test_any_step(backend: type[AttentionBackend], case: Case) -> None:
    check(case, backend())


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_long_chunks_are_cut_into_pieces(window: int | None, softcap: float | None) -> None:
    """More query tokens than share one mask, from the start and from the middle of a prompt."""
    case = Case([3, 700, 650], [(600, 600), (700, 300), (513, 257)], page_size=16, window=window, softcap=softcap)
    for backend in (SdpaBackend(), EagerBackend()):
        check(case, backend)


def test_one_backend_serves_step_after_step() -> None:
    """Masks are kept and grow; nothing of an earlier step is left over."""
    backend = SdpaBackend()
    case = Case([5, 9], [(20, 4)])
    steps = [([5, 9], [(20, 4)]), ([], [(1500, 10)]), ([1, 2, 3], []), ([40], [(3000, 2), (1800, 300)])]
    for contexts, chunks in steps:
        for window in (None, 7):
            check(replace(case, decodes=contexts, chunks=chunks, window=window, page_size=64), backend)


@pytest.mark.parametrize("backend", [EagerBackend, SdpaBackend])  # the kernels are for float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend: type[AttentionBackend], dtype: torch.dtype) -> None:
    for softcap in (None, 5.0):
        check(Case([9, 30], [(12, 12), (20, 6)], dtype=dtype, softcap=softcap), backend(), tolerance=3e-2)


def test_reserved_block_in_a_real_table_is_not_written() -> None:
    """A padded sequence may claim a length: its table holds only the reserved block, which must stay zeros."""
    layer = make_layer(Case([], []), 4)
    for backend in (SdpaBackend(), EagerBackend()):
        inputs = step([Work(1, 1, [READ_BLOCK]), Work(2, 1, [3])])
        layer.key[3, 0] = layer.value[3, 0] = 1.0
        backend.begin(inputs, 4)
        backend.write(layer, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
        out = backend.attend(layer, torch.ones(2, 6, 8), scale=1.0)
        assert (layer.key[READ_BLOCK] == 0).all()
        assert (layer.value[READ_BLOCK] == 0).all()
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[1], torch.ones(6, 8))


def test_layouts_are_what_they_are_meant_to_be() -> None:
    """The three layouts take different paths: rows with and without other layers between the blocks, and no rows."""
    rows = {layout: make_layer(Case([], [], layout=layout), 6).block_rows for layout in LAYOUTS}
    assert rows == {"dense": 4, "pool": 16, "odd": 0}


@given(lengths=st.lists(st.integers(0, 3000), max_size=50), budget=st.integers(1, 5000))
@settings(max_examples=200)
def test_groups_waste_little(lengths: list[int], budget: int) -> None:
    from cbengine.attention.sdpa import group_by_length

    array = np.array(lengths, np.int64)
    groups = group_by_length(array, budget)
    assert sorted(i for group in groups for i in group) == [i for i, n in enumerate(lengths) if n]
    for group in groups:
        longest, shortest = array[group].max(), array[group].min()
        assert shortest >= longest - max(64, longest // 4)
        assert len(group) == 1 or len(group) * longest <= budget


def test_one_long_sequence_pads_no_short_ones() -> None:
    from cbengine.attention.sdpa import group_by_length

    groups = group_by_length(np.array([30] * 50 + [5000] + [30] * 50), 100_000)
    assert [list(group) for group in groups] == [[50], [*range(50), *range(51, 101)]]
