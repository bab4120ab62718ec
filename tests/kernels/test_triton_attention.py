"""The Triton attention kernels against their plain reference and attention's definition, in Triton's interpreter.

What the kernels compile to is checked in `test_triton_compile.py`.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.attention.base import LayerKV
from cbengine.attention.triton import TritonBackend
from cbengine.execution.inputs import StepInputs
from cbengine.kernels.triton import launch
from cbengine.kernels.triton.attention_reference import merge_reference, write_pages_reference
from cbengine.kernels.triton.tiles import most_split_programs, splits_for
from cbengine.models.adapter import TransformersRunner
from tests.attention.packing import Work, step
from tests.attention.test_backends import Case, check
from tests.kernels.paged_cases import SOUND, paged, planted, run
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import tiny

# The interpreter computes with numpy, which warns where a device's exponential is silently infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few tokens: the interpreter takes milliseconds for each tile."""
    chunks = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=2))
    pieces = [(past + count, count) for past, count in chunks] + [(0, 1)] * draw(st.integers(0, 1))
    decodes = draw(st.lists(st.integers(0, 50), max_size=3, min_size=0 if pieces else 1))
    return Case(
        decodes=decodes,
        chunks=pieces,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([8, 16, 20])),
        page_size=draw(st.sampled_from([16, 20, 32, 48])),
        layout=draw(st.sampled_from(["dense", "pool", "odd"])),
        window=draw(st.none() | st.integers(1, 40)),
        softcap=draw(st.none() | st.floats(0.5, 20)),
        sinks=draw(st.booleans()),
        padded_tokens=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**16)),
    )


@given(case=cases())
@settings(max_examples=6)
def test_any_step(case: Case) -> None:
    check(case, TritonBackend())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(case=cases())
@settings(max_examples=400)
def test_any_step_many_times(case: Case) -> None:
    check(case, TritonBackend())


@pytest.mark.parametrize(
    ("dim", "dtype", "page_size"),
    [
        (64, torch.float16, 16),
        (80, torch.bfloat16, 256),
        (96, torch.float32, 48),
        (128, torch.bfloat16, 16),
        (256, torch.float16, 64),
    ],
    ids=str,
)
def test_sizes_of_heads(dim: int, dtype: torch.dtype, page_size: int) -> None:
    case = Case([37], [(75, 3)], kv_heads=1, group=4, dim=dim, dtype=dtype, page_size=page_size, window=70)
    check(case, TritonBackend(), tolerance=TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page_size", [16, 24, 48, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_sizes_of_heads_all(dim: int, dtype: torch.dtype, page_size: int) -> None:
    for window, softcap, sinks in ((None, None, False), (100, 5.0, True)):
        case = Case([137, 5], [(275, 70), (40, 40)], dim=dim, dtype=dtype, page_size=page_size)
        case = replace(case, window=window, softcap=softcap, sinks=sinks)
        check(case, TritonBackend(), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("splits", "window", "sinks"), [(1, 40, True), (2, None, True), (5, 40, False), (19, None, False)]
)
def test_splits_merge_to_the_whole(splits: int, window: int | None, sinks: bool) -> None:
    """With more splits than tiles too: those that saw nothing weigh nothing, and read nothing of the workspace."""
    pages = paged([(130, 1), (0, 1), (20, 2)], dim=16, page_size=16, padded_tokens=1)
    scores = launch.Scores(0.3, window, None, torch.tensor([0.5, -1.0]) if sinks else None)
    workspace = launch.Workspace(2, 1, 16, torch.device("cpu"), multiprocessors=20)
    workspace.acc.fill_(torch.nan)
    workspace.sums.fill_(torch.nan)
    out = torch.full_like(pages.query, 7.0)
    launch.launch_decode(pages.step, pages.query, pages.key, pages.value, out, workspace, scores, splits)
    expected = pages.expected(scores)
    expected[2:4] = 7.0  # two queries: not this kernel's
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@given(data=st.data())
@settings(max_examples=10)
def test_merge(data: st.DataObject) -> None:
    heads, splits, dim = 2, data.draw(st.integers(1, 40)), 8
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    acc, tops = torch.randn(2, heads, splits, dim, generator=rng), 5 * torch.randn(2, heads, splits, generator=rng)
    sums = torch.rand(2, heads, splits, generator=rng)
    empty = torch.rand(2, heads, splits, generator=rng) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    tops[empty], sums[empty], acc[empty] = -torch.inf, 0.0, torch.nan
    sinks = torch.randn(heads, generator=rng) if data.draw(st.booleans()) else None
    out = torch.empty(2, heads, dim)
    launch.merge_kernel[(heads, 2)](
        acc.view(-1, dim), torch.stack([tops, sums], -1), torch.tensor([0, 1, 2], dtype=torch.int32), sinks, out, 2, splits,
        D=dim, D_PAD=16, ROW=heads * dim, CHUNK=16, HAS_SINKS=sinks is not None,
    )  # fmt: skip
    torch.testing.assert_close(out, merge_reference(acc, tops, sums, sinks), rtol=1e-5, atol=1e-5)


@given(
    num_seqs=st.integers(1, 600), kv_heads=st.integers(1, 64), tokens=st.integers(0, 200_000), sms=st.integers(1, 200)
)
def test_the_workspace_holds_any_split(num_seqs: int, kv_heads: int, tokens: int, sms: int) -> None:
    splits = splits_for(num_seqs, kv_heads, tokens, sms)
    assert splits == 1 or num_seqs * kv_heads * splits <= most_split_programs(kv_heads, sms)
    assert 1 <= splits <= max(1, -(-tokens // 256))


def test_few_sequences_are_split_and_many_are_not() -> None:
    assert splits_for(1, 8, 128_000, 132) == 66
    assert splits_for(1, 8, 100, 132) == 1
    assert splits_for(64, 8, 128_000, 132) == 1


def test_long_contexts_are_split_by_the_backend() -> None:
    """The interpreter counts as a device of four multiprocessors: one sequence of one KV head is cut in three here."""
    assert splits_for(2, 1, 600, 4) == 3
    check(Case([600, 20], [], kv_heads=1, group=2, page_size=16, sinks=True, padded_tokens=1), TritonBackend())


def test_write() -> None:
    key, value = torch.randn(2, 3, 2, 20).transpose(1, 2).contiguous().transpose(1, 2)  # heads apart
    blocks, offsets = torch.tensor([3, 2, 2], dtype=torch.int32), torch.tensor([15, 0, 7], dtype=torch.int32)
    found, expected = torch.zeros(2, 2, 5, 16, 2, 20)
    launch.write_pages(key, value, *found, blocks, offsets)
    write_pages_reference(key, value, *expected, blocks, offsets)
    assert torch.equal(found, expected)


def test_a_launch_serves_other_lengths() -> None:
    """What a graph replays: the same addresses and numbers, with other sequences in the tensors."""
    bucket = paged([(90, 1), (60, 30), (80, 9)], dim=16, page_size=16)
    workspace = launch.Workspace(2, 1, 16, torch.device("cpu"))
    for sequences, window in [
        ([(17, 1), (3, 3), (0, 0)], None),
        ([(40, 20), (5, 1), (33, 18)], 9),
        ([(1, 1)] * 3, None),
    ]:
        other = paged(
            sequences, dim=16, page_size=16, seed=len(sequences), padded_tokens=40 - sum(n for _, n in sequences)
        )
        for name in ("tables", "context_lens", "query_starts"):
            source = getattr(other.step, name)
            getattr(bucket.step, name).zero_()[tuple(slice(n) for n in source.shape)] = source
        bucket.query.copy_(other.query)
        scores = launch.Scores(0.3, window)
        out = launch.attend_pages(bucket.step, bucket.query, other.key, other.value, workspace, scores)
        torch.testing.assert_close(out, other.expected(scores), rtol=1e-5, atol=1e-5)


def test_no_host_array_is_read() -> None:
    """Nor anything of the step but its tensors and its sizes."""
    given = step([Work(20, 1, [3, 5])], [Work(18, 4, [4, 2])])
    needed = ("num_tokens", "num_seqs", "max_query_len", "max_context_len", "token_ids", "positions", "query_starts",
              "context_lens", "block_tables")  # fmt: skip

    class Bare:
        pass

    bare = Bare()
    for name in needed:
        setattr(bare, name, getattr(given, name))
    outputs = []
    for inputs in (given, bare):
        backend, layer = TritonBackend(), LayerKV.of(*torch.zeros(2, 6, 16, 1, 16))
        torch_rng = torch.Generator().manual_seed(0)
        key, value = torch.randn(2, 5, 1, 16, generator=torch_rng)
        backend.begin(inputs, 16)  # type: ignore[arg-type]
        backend.write(layer, key, value)
        outputs.append(backend.attend(layer, torch.randn(5, 2, 16, generator=torch_rng), scale=1.0))
    assert isinstance(given, StepInputs)
    assert torch.equal(*outputs)


def test_every_kernel_of_a_kind_is_launched_by_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where launching compiles: whole and split decoding, merging, and prompts, from one padded token."""
    launched = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self._name, self._kernel = name, getattr(launch, name)

        def __getitem__(self, grid: tuple[int, ...]):
            launched.append((self._name, grid))
            return self._kernel[grid]

    for name in ("decode_kernel", "merge_kernel", "varlen_kernel"):
        monkeypatch.setattr(launch, name, Recorder(name))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 4)
    backend, layer = TritonBackend(), LayerKV.of(*torch.zeros(2, 3, 16, 1, 16))
    probe = step([Work(0, 1, [])])
    for _ in range(2):
        backend.begin(probe, 16)
        out = backend.attend(layer, torch.ones(1, 2, 16), scale=1.0)
        assert torch.equal(out, torch.zeros(1, 2, 16))
    first, split, merge, prompts, real, again = launched
    assert [first[0], split[0], merge[0]] == ["decode_kernel", "decode_kernel", "merge_kernel"]
    assert prompts[0] == "varlen_kernel"
    assert (first[1][2], split[1][2]) == (1, 2)
    assert real == again == ("decode_kernel", (1, 1, 1))


def test_where_it_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for capability, reason in (((9, 0), None), ((7, 5), "needs a GPU of compute capability 8.0 or newer, not 7.5")):
        monkeypatch.setattr("cbengine.attention.triton.compute_capability", lambda device, c=capability: c)
        assert TritonBackend.unavailable(cuda) == reason
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "needs the package triton, which cannot be imported" in str(TritonBackend.unavailable(cuda))


# What published kernels got wrong: each case fails when its fault is planted (`test_planted_faults_are_found`).


def padded_rows(kernels: dict) -> None:
    """Padded sequences of one and of several tokens, tokens past the last one: zeros, whatever was in the memory."""
    run(kernels, paged([(0, 1), (9, 1), (0, 3), (4, 2)], dim=16, page_size=16, padded_tokens=3))


def window_edges(kernels: dict) -> None:
    """Windows that end on, before and behind the border of a page and of a tile."""
    for window in (1, 16, 17, 32):
        run(kernels, paged([(49, 1), (65, 17), (33, 2)], dim=16, page_size=16), window=window)


def foreign_pages(kernels: dict) -> None:
    """Blocks behind the window, and those past a sequence's end, are somebody else's: full of NaN, or not there at all."""
    for page_size in (16, 32, 48):
        pages = paged([(120, 1), (130, 7), (20, 1)], dim=16, page_size=page_size)
        run(kernels, pages.with_foreign_blocks(window=10), window=10)


def odd_pages(kernels: dict) -> None:
    """A page size that is no power of two."""
    run(kernels, paged([(75, 1), (90, 30)], dim=16, page_size=24))


def grouped_heads(kernels: dict) -> None:
    """Three query heads for each of two KV heads, in a size that is padded."""
    run(kernels, paged([(30, 1), (40, 20)], heads=6, kv_heads=2, dim=20, page_size=16))


def large_scores(kernels: dict) -> None:
    """A soft cap with scores whose exponential overflows, and sinks far above and below all scores."""
    pages = paged([(30, 1), (20, 20)], dim=16, page_size=16)
    pages.query *= 100
    run(kernels, pages, softcap=2.0)
    run(kernels, pages, sinks=torch.tensor([150.0, -200.0]))


def far_blocks(kernels: dict) -> None:
    """A block more than 2**31 elements behind the pool's start. (The memory is reserved, and hardly any of it touched.)"""
    stride, block, size = 2**29 + 256, 8, 8 * (2**29 + 256) + 2048
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, 2 * size, flags=flags), dtype=torch.float16)
    key = memory.as_strided((9, 16, 1, 16), (stride, 16, 16, 1))
    value = memory.as_strided((9, 16, 1, 16), (stride, 16, 16, 1), 1024)
    pages = paged([(9, 1), (12, 3)], dim=16, page_size=16, dtype=torch.float16)
    near = pages.step.tables[0, 0].item(), pages.step.tables[1, 0].item()
    for old, new in zip(near, (block, 1), strict=True):
        key[new], value[new] = pages.key[old], pages.value[old]
    pages = replace(pages, key=key, value=value)
    pages.step.tables[:, 0] = torch.tensor([block, 1])
    run(kernels, pages, tolerance=4e-3)


FAULTS = {
    "offsets of 32 bits": (far_blocks, "walk", "blocks.to(tl.int64) * kv_block", "blocks * kv_block.to(tl.int32)"),
    "division by no weight": (padded_rows, "walk", "total > 0.0, total, 1.0", "total > -1.0, total, 1.0"),
    "-inf minus -inf": (window_edges, "walk", 'tl.where(highest == -float("inf"), 0.0, highest)', "highest"),
    "padding is left": (padded_rows, "decode", "tl.load(query_starts + num_seqs) + seq, num_tokens", "num_tokens, num_tokens"),
    "window one too wide": (window_edges, "walk", "> positions[:, None] - window", ">= positions[:, None] - window"),
    "window one too narrow": (window_edges, "decode", "context - window, 0", "context - window + 1, 0"),
    "causal one too far": (window_edges, "walk", "t[None, :] <= positions", "t[None, :] - 1 <= positions"),
    "reads behind the window": (foreign_pages, "varlen", "tl.maximum(position - window + 1, 0)", "position * 0"),
    "reads past the end": (foreign_pages, "walk", "& (t < high)", "& (t < high + 64)"),
    "whole tiles that are not": (odd_pages, "varlen", "(position + 1) // BLOCK_N", "(position + BLOCK_N) // BLOCK_N"),
    "pages as powers of two": (odd_pages, "walk", "(t % PAGE) * kv_token", "(t & (PAGE - 1)) * kv_token"),
    "heads by the wrong group": (grouped_heads, "varlen", "kv_head * G + r % G", "kv_head + r % G * 2"),
    "padded head size is read": (grouped_heads, "walk", "inside[:, None] & (d < D)[None, :]", "inside[:, None]"),
    "inf over inf": (large_scores, "walk", "1.0 - 2.0 / (", "(tl.exp2(scores * (2.0 * LOG2E / softcap)) - 1.0) / ("),
    "sinks forgotten": (large_scores, "walk", "if HAS_SINKS:", "if HAS_SINKS and not HAS_SINKS:"),
}  # fmt: skip

PROBES = sorted({probe for probe, *_ in FAULTS.values()}, key=lambda probe: probe.__name__)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
def test_the_kernels_have_no_such_fault(probe) -> None:
    probe(SOUND)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the fault computes
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    probe, place, right, wrong = FAULTS[fault]
    kernels = planted(tmp_path, place, right, wrong)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        probe(kernels)


def tokens_equal_generate(name: str, lengths: list[int], new: int, budget: int) -> None:
    """`budget`: tokens of a step, at which prompts are cut and mixed with decoding sequences."""
    model = tiny(name)
    prompts = prompts_of(lengths, seed=2)
    expected = [reference(model, prompt, new)[0] for prompt in prompts]
    served = Paged(TransformersRunner(model, attention="triton"), page_size=16, num_blocks=20)
    assert [sequence.tokens for sequence in served.generate(prompts, new, budget=budget)] == expected


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_equal_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two pieces; full attention, and windows of 8 tokens with a soft cap."""
    monkeypatch.setattr(TritonBackend, "devices", ())
    tokens_equal_generate(name, [20], new=2, budget=17)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama-mha", "gemma2", "gemma3-text", "gpt-oss", "mistral-window", "qwen3"])
def test_tokens_equal_generate_in_a_crowd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "devices", ())
    tokens_equal_generate(name, [3, 21, 40], new=6, budget=16)
