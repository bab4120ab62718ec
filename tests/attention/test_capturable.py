"""What a CUDA graph would freeze: nothing but sizes, and no step may look at the host or wait for the device.

On tensors without data, as if on a GPU, a read of a device tensor raises; the host's arrays are replaced by something that
cannot be read. Then steps are traced, which bakes every number as a capture does, and run again with other lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cbengine.attention import AttentionBackend, LayerKV
from cbengine.attention.flash import Flash2Backend, Flash3Backend, FlashBackend
from cbengine.attention.packed import PackedStep
from cbengine.attention.torch_native import TorchBackend
from cbengine.execution.inputs import StepInputs
from tests.attention.packing import Work, step
from tests.support.flash_double import HALF, FlashDouble, install

OTHER = "meta"
"""A device that is not the host, and whose tensors cannot be read or mixed with the host's."""
BACKENDS: list[type[AttentionBackend]] = [Flash2Backend, Flash3Backend, TorchBackend]
DECODES = ([Work(9, 1, [2, 3, 4]), Work(0, 1, [])], [])
MIXED = ([Work(9, 1, [2, 3, 4])], [Work(12, 6, [5, 6, 7]), Work(0, 1, [])])


class Unreadable:
    """In a host array's place."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"a captured step read a host array ({name})")

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("a captured step read a host array")

    __len__ = __iter__ = __array__ = __getitem__  # type: ignore[assignment]


def for_capture(inputs: StepInputs, to: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> StepInputs:
    """The inputs with unreadable host arrays, and their tensors changed by `to`."""
    changed: dict[str, Any] = {}
    for f in fields(inputs):
        value = getattr(inputs, f.name)
        if isinstance(value, np.ndarray):
            changed[f.name] = Unreadable()
        elif isinstance(value, torch.Tensor):
            changed[f.name] = to(value)
    return replace(inputs, **changed)


@pytest.mark.parametrize("work", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_step_on_a_gpu_without_data(
    monkeypatch: pytest.MonkeyPatch, kind: type[AttentionBackend], window: int | None, work: Any
) -> None:
    """Shapes, dtypes and devices of a whole step; torch's function is the real one where it knows block tables."""
    double = install(monkeypatch) if kind is not TorchBackend or kind.unavailable(torch.device("cpu")) else None
    backend = kind()
    if double is not None:
        for name in ("_packed", "_decode", "_function"):
            monkeypatch.setattr(backend, name, kernel_without_data, raising=False)
    with FakeTensorMode(), torch.inference_mode():
        inputs = for_capture(step(*work, padded_tokens=2), lambda t: torch.empty(t.shape, dtype=t.dtype, device=OTHER))
        pool = torch.empty(9, 2, 256, 2, 64, dtype=torch.bfloat16, device=OTHER)
        layer = LayerKV.of(pool[:, 0], pool[:, 1])
        query = torch.empty(6, inputs.num_tokens, 64, dtype=torch.bfloat16, device=OTHER).transpose(0, 1)
        new = torch.empty(2, inputs.num_tokens, 2, 64, dtype=torch.bfloat16, device=OTHER)
        backend.begin(inputs, 256)
        backend.write(layer, new[0], new[1])
        out = backend.attend(layer, query, scale=0.125, window=window)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, torch.bfloat16, OTHER)


def kernel_without_data(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Any of the functions: everything that it is given must be on the device, and every length a tensor there."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    assert len(given) >= 4 and {x.device.type for x in given} == {OTHER}
    return torch.empty_like(q, memory_format=torch.contiguous_format)


# --- replays with other lengths -----------------------------------------------------------------------------------------


@torch.library.custom_op("cbengine_tests::kernel", mutates_args={"key", "value"})
def kernel(
    which: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, new: list[torch.Tensor],
    lengths: list[torch.Tensor], table: torch.Tensor, most: list[int], scale: float, window: list[int],
) -> torch.Tensor:  # fmt: skip
    """The double as one operation that a trace can hold, with all its numbers."""
    return _KERNELS[which](query, key, value, new, lengths, table, most, scale, (window[0], window[1]))


@kernel.register_fake
def _(
    which: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, new: list[torch.Tensor],
    lengths: list[torch.Tensor], table: torch.Tensor, most: list[int], scale: float, window: list[int],
) -> torch.Tensor:  # fmt: skip
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


_KERNELS: dict[int, Callable[..., torch.Tensor]] = {}


def traceable(backend: FlashBackend, double: FlashDouble) -> None:
    """Have the backend call the double through the operation above."""

    def packed2(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
                block_table: Any, softmax_scale: float, causal: bool, window_size: Any, softcap: float) -> Any:  # fmt: skip
        assert causal and softcap == 0.0
        lengths, most = [cu_seqlens_q, cu_seqlens_k], [max_seqlen_q, max_seqlen_k]
        return kernel(0, q, k, v, [], lengths, block_table, most, softmax_scale, list(window_size))

    def run_packed2(
        q: Any, k: Any, v: Any, new: Any, lengths: Any, table: Any, most: Any, scale: Any, window: Any
    ) -> Any:
        return double.flash_attn_varlen_func(
            q, k, v, *lengths, *most, softmax_scale=scale, causal=True, window_size=window, block_table=table
        )

    def decode2(q: Any, k_cache: Any, v_cache: Any, *, k: Any, v: Any, cache_seqlens: Any, block_table: Any,
                softmax_scale: float, causal: bool, window_size: Any, softcap: float) -> Any:  # fmt: skip
        assert causal and softcap == 0.0
        return kernel(
            1, q, k_cache, v_cache, [k, v], [cache_seqlens], block_table, [], softmax_scale, list(window_size)
        )

    def run_decode2(
        q: Any, k: Any, v: Any, new: Any, lengths: Any, table: Any, most: Any, scale: Any, window: Any
    ) -> Any:
        return double.flash2_with_kvcache(
            q, k, v, *new, cache_seqlens=lengths[0], block_table=table, softmax_scale=scale, causal=True,
            window_size=window,
        )  # fmt: skip

    _KERNELS.update({0: run_packed2, 1: run_decode2})
    backend._packed, backend._decode = packed2, decode2


NAMES = ("token_ids", "positions", "query_starts", "context_lens", "block_tables")


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("decoding", [True, False], ids=["decodes", "mixed"])
def test_a_replay_with_other_lengths(monkeypatch: pytest.MonkeyPatch, decoding: bool, window: int | None) -> None:
    """Captured with a bucket's sizes over short sequences, replayed over long ones, and the other way round."""
    double = install(monkeypatch, dtypes=(*HALF, torch.float32), page_multiple=4)
    pages = [list(range(2 + 6 * i, 8 + 6 * i)) for i in range(3)]

    def bucket(contexts: list[int]) -> StepInputs:
        works = [Work(n, 1, table if n else [0] * 6) for n, table in zip(contexts, pages, strict=True)]
        chunk = Work(contexts[0], min(contexts[0], 5), pages[0])
        made = step(works) if decoding else step(works[1:], [chunk], padded_tokens=5 - chunk.count + 1)
        return replace(made, max_query_len=1 if decoding else 5, max_context_len=24)

    short, long = bucket([3, 5, 0]), bucket([24, 17, 9])
    assert short.num_tokens == long.num_tokens and short.block_tables.shape == long.block_tables.shape
    for captured, replayed in ((short, long), (long, short)):
        results = [replay(captured, replayed, window, graph) for graph in (double, None)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def replay(
    captured: StepInputs, replayed: StepInputs, window: int | None, graph: FlashDouble | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's result and pages for `replayed`: by a trace of `captured`, or without one."""
    torch.manual_seed(0)
    pool = torch.randn(20, 2, 4, 2, 8)
    layer = LayerKV.of(pool[:, 0], pool[:, 1])
    query, key, value = torch.randn(3, captured.num_tokens, 2, 8)
    backend = Flash2Backend()

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        inputs = for_capture(replace(captured, **dict(zip(NAMES, tensors, strict=True))))
        backend.begin(inputs, 4)
        backend.write(layer, key, value)
        return backend.attend(layer, query, scale=0.3, window=window)

    given = [getattr(replayed, name) for name in NAMES]
    if graph is None:
        return run(given), pool[2:]
    traceable(backend, graph)
    before = pool.clone()
    trace = make_fx(run)([getattr(captured, name) for name in NAMES])
    pool.copy_(before)  # tracing has run the step once
    return trace(given), pool[2:]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda step, inputs: setattr(step, "max_context_len", 5), "max_seqlen_k is too small"),
        (lambda step, inputs: setattr(step, "max_query_len", 2), "max_seqlen_q is too small"),
        (lambda step, inputs: inputs.host_context_lens.max(), "a captured step read a host array"),
        (lambda step, inputs: step.context_lens.max().item(), "out of a tracing tensor"),
    ],
    ids=["longest of the captured", "longest query of the captured", "host array", "device read"],
)
def test_what_a_graph_would_bake_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[PackedStep, StepInputs], Any], found: str
) -> None:
    double = install(monkeypatch, dtypes=(torch.float32,), page_multiple=4)
    before = PackedStep.__init__

    def init(self: PackedStep, inputs: StepInputs, page_size: int) -> None:
        before(self, inputs, page_size)
        change(self, inputs)

    monkeypatch.setattr(PackedStep, "__init__", init)
    short, long = (step([], [Work(n, min(n, 5), range(2, 8))], padded_tokens=5 - min(n, 5) + 1) for n in (2, 24))
    with pytest.raises((AssertionError, RuntimeError), match=found):
        replay(replace(short, max_query_len=5), replace(long, max_query_len=5), None, double)
