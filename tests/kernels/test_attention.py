"""The attention kernel: every build of it against the definition, and what its results do not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbengine.attention import LayerKV
from cbengine.attention import cpu as backend_module
from cbengine.attention.cpu import CpuBackend
from cbengine.errors import UnsupportedFeatureError
from cbengine.kernels.batch import StepBatch
from cbengine.kernels.library import get_library
from tests.attention.packing import Work, step
from tests.attention.test_backends import Case, cases, check
from tests.kernels.variants import NAMES, variant

PAGE = 8


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    """The backend over one build of the kernels."""
    monkeypatch.setattr(backend_module, "get_library", lambda: variant(request.param))
    return CpuBackend()


@given(
    case=cases(),
    dim=st.sampled_from([4, 12, 64, 80]),
    page_size=st.sampled_from([4, 5, 64, 256]),
    size=st.integers(1, 3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step(backend: CpuBackend, case: Case, dim: int, page_size: int, size: int) -> None:
    torch.set_num_threads(size)
    check(replace(case, dim=dim, page_size=page_size), backend, tolerance=5e-5)


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("extras", [{}, {"softcap": 5.0, "sinks": True}])
def test_long_contexts_and_chunks(backend: CpuBackend, window: int | None, extras: dict) -> None:
    case = Case([3, 700, 650], [(600, 600), (700, 300), (513, 257)], page_size=16, window=window, **extras)
    for group, dim in ((1, 8), (3, 64), (7, 16)):
        check(replace(case, group=group, kv_heads=2, dim=dim), backend, tolerance=5e-5)


class Sequence:
    """Keys, values and queries of one sequence, and pages in some order."""

    def __init__(
        self, length: int, blocks: list[int], seed: int, heads: int = 6, kv_heads: int = 2, dim: int = 16
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.key, self.value = torch.randn(2, length, kv_heads, dim, generator=generator)
        self.query = torch.randn(length, heads, dim, generator=generator)
        self.blocks = blocks

    def work(self, context: int, count: int) -> Work:
        return Work(context, count, self.blocks[: -(-context // PAGE)])


def compute(
    sequences: list[Sequence], spans: list[tuple[int, int]], pool: torch.Tensor, window: int | None
) -> list[torch.Tensor]:
    """One step: tokens [begin, end) of each sequence."""
    works = [s.work(end, end - begin) for s, (begin, end) in zip(sequences, spans, strict=True)]
    single = [i for i, work in enumerate(works) if work.count == 1]
    order = single + [i for i in range(len(works)) if i not in single]
    inputs = step([works[i] for i in single], [works[i] for i in order[len(single) :]])

    def packed(name: str) -> torch.Tensor:
        return torch.cat([getattr(sequences[i], name)[slice(*spans[i])] for i in order])

    layer = LayerKV.of(pool[:, 0], pool[:, 1])
    backend = CpuBackend()
    backend.begin(inputs, PAGE)
    backend.write(layer, packed("key"), packed("value"))
    out = backend.attend(layer, packed("query"), scale=0.25, window=window)
    parts = out.split([spans[i][1] - spans[i][0] for i in order])
    return [parts[order.index(i)] for i in range(len(works))]


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_token_does_not_depend_on_its_company(window: int | None, size: int) -> None:
    """Bit by bit: alone or in a crowd, in one chunk or many or one token at a time, wherever its pages are."""
    rng = np.random.default_rng(0)
    length = 210
    torch.set_num_threads(size)
    expected = None
    for cuts in ([0, 210], [0, 64, 210], [0, 5, 77, 78, 79, 209, 210], [0, 200, *range(201, 211)]):
        for company in (0, 3, 20):
            pool = torch.full((900, 2, PAGE, 2, 16), torch.nan)
            free = iter((rng.permutation(898) + 2).tolist())
            crowd = [Sequence(length, [next(free) for _ in range(27)], seed) for seed in range(company + 1)]
            found = torch.cat([compute(crowd, [span] * len(crowd), pool, window)[0] for span in pairwise(cuts)])
            expected = found if expected is None else expected
            assert torch.equal(found, expected)


def alike(shared: list[int], free: Iterator[int], seed: int) -> list[Sequence]:
    """Sequences of different lengths, each with so many of its first tokens from the same text, in the same pages."""
    most = max(shared)
    first = Sequence(most, [next(free) for _ in range(most // PAGE)], seed)
    found = []
    for i, tokens in enumerate(shared):
        length = tokens + 1 + 13 * i % 70
        own = Sequence(length, [], seed + 1 + i)
        own.key[:tokens], own.value[:tokens] = first.key[:tokens], first.value[:tokens]
        same = first.blocks[: tokens // PAGE]
        own.blocks = same + [next(free) for _ in range(-(-length // PAGE) - len(same))]
        found.append(own)
    return found


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_beginning_that_many_have_in_common(
    window: int | None, size: int, backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what each gives alone: beginnings of 8 to 104 tokens of three texts, mixed with others, in any order."""
    monkeypatch.setattr(f"{__name__}.CpuBackend", lambda: backend)
    torch.set_num_threads(size)
    rng = np.random.default_rng(1)
    pool = torch.full((900, 2, PAGE, 2, 16), torch.nan)
    free = iter((rng.permutation(898) + 2).tolist())
    crowd = alike([104, 104, 40, 104, 72, 104, 104, 104, 72, 40, 104], free, 100)
    crowd += alike([64] * 4, free, 200) + alike([8] * 3, free, 300)
    crowd += [Sequence(n, [next(free) for _ in range(-(-n // PAGE))], n) for n in (1, 50, 105)]
    crowd = crowd[::2] + crowd[1::2]
    compute(crowd, [(0, len(s.key) - 1) for s in crowd], pool, window)  # the past: what is the same is written again
    last = [(len(s.key) - 1, len(s.key)) for s in crowd]
    together = compute(crowd, last, pool, window)
    for sequence, span, found in zip(crowd, last, together, strict=True):
        assert torch.equal(found, compute([sequence], [span], pool, window)[0])


def test_what_begins_alike_is_found() -> None:
    """`place` puts sequences with one query side by side by their first block, and counts the keys that neighbours share."""
    library = get_library()
    assert library is not None
    blocks = [[9, 4, 5], [3, 4, 5, 6], [], [9, 4, 7], [9, 4, 7, 8]]
    contexts = [20, 30, 0, 18, 25]
    works = [Work(c, 1, b) for c, b in zip(contexts, blocks, strict=True)]
    batch = StepBatch()
    batch.fill(step(works, [Work(20, 3, [9, 4, 5])]), PAGE)
    library.place(batch.pointer)
    order, alike = batch.order.tolist(), batch.alike.tolist()
    assert order == [2, 1, 0, 3, 4, 5]
    assert alike == [0, 0, 0, 16, 17, 0]  # the last two have all of 18 in common, but each one's newest is its own


def test_the_kernel_is_for_single_precision() -> None:
    case = Case([9, 30], [(12, 12)], dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        check(case, CpuBackend())


def test_without_kernels_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "get_library", lambda: None)
    with pytest.raises(UnsupportedFeatureError, match=r'could not be built.*use "sdpa"'):
        CpuBackend()
