"""Stand-ins for the kernels of FlashAttention 2 and 3 and of torch's `varlen_attn`, in plain torch, for any device.

They have the kernels' signatures, in-place semantics and alignment of masks, compute in float32, and are stricter: what
the kernels take in silence and compute nonsense from (entries of block tables, lengths over the bounds, an append past the
end) raises `FlashDoubleError`. What the kernels leave unwritten is NaN. Behaviour as of flash-attn 2.8.3, its Hopper
interface of that time, and torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

HALF = (torch.float16, torch.bfloat16)
READ_BLOCK, WRITE_BLOCK = 0, 1
"""The reserved blocks of the cache: a live sequence reads neither, and nobody may write to the first."""


class FlashDoubleError(RuntimeError):
    """The kernel would refuse this call, or would do something that nobody wants."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise FlashDoubleError(message)


@dataclass
class FlashDouble:
    """The functions, and what they were called with. `dtypes` and `page_multiple` are the kernels' own by default."""

    dtypes: tuple[torch.dtype, ...] = HALF
    page_multiple: int = 256
    """Of FlashAttention 2 and torch; FlashAttention 3 takes any page size."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def names(self) -> list[str]:
        """Of the functions called, in order."""
        return [name for name, _ in self.calls]

    # --- the functions, by the kernels' own signatures --------------------------------------------------------------

    def flash_attn_varlen_func(
        self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """FlashAttention 2: packed queries; the lengths of the keys are the differences of `cu_seqlens_k`."""
        self.calls.append(("flash2.varlen", {"max_seqlen_q": max_seqlen_q, "window_size": window_size}))
        _check(dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs, "not in this double")
        _check(type(softcap) is float, "softcap must be a float")
        lens = _differences(cu_seqlens_k, "cu_seqlens_k", q.device)
        pages = _Pages(self, k, v, block_table, "block_table", self.page_multiple)
        return self._packed(
            q, pages, cu_seqlens_q, lens, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )

    def flash2_with_kvcache(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
        block_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
        alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """FlashAttention 2: the same number of queries for every sequence."""
        self.calls.append(("flash2.kvcache", {"appends": k is not None, "window_size": window_size}))
        _check(rotary_cos is None and rotary_sin is None and alibi_slopes is None, "not in this double")
        _check(cache_batch_idx is None, "Paged KVcache does not support cache_batch_idx")
        _check(cache_leftpad is None, "We don't support Paged KV and leftpad_k running at the same time yet")
        pages = _Pages(self, k_cache, v_cache, block_table, "block_table", self.page_multiple)
        return self._batched(q, pages, k, v, cache_seqlens, softmax_scale, causal, window_size, softcap)

    def flash3_with_kvcache(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
        page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
        max_seqlen_q: int | None = None, rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None,
        v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
        rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: Any = None,
        sm_margin: int = 0, return_softmax_lse: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """FlashAttention 3: packed queries with `cu_seqlens_q`, else the same number for every sequence."""
        unused = (qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, scheduler_metadata)
        _check(all(x is None for x in unused) and attention_chunk == 0, "not in this double")
        pages = _Pages(self, k_cache, v_cache, page_table, "page_table", 1)
        packed = cu_seqlens_q is not None
        self.calls.append(
            ("flash3.packed" if packed else "flash3.kvcache", {"appends": k is not None, "window_size": window_size})
        )
        if not packed:
            return self._batched(q, pages, k, v, cache_seqlens, softmax_scale, causal, window_size, softcap)
        _check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        _check(k is None, "appending to packed queries needs cu_seqlens_k_new, which is not in this double")
        _ints(cache_seqlens, "seqused_k", (len(cu_seqlens_q) - 1,), q.device)
        capacity = pages.table.shape[1] * pages.size
        return self._packed(
            q, pages, cu_seqlens_q, cache_seqlens.tolist(), max_seqlen_q or 0, capacity, softmax_scale, causal,
            window_size, softcap, swaps=False,
        )  # fmt: skip

    def varlen_attn(
        self, query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
        return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None, num_splits: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """torch: causal if the window is (-1, 0); the lengths of the keys are `seqused_k`."""
        self.calls.append(("torch.varlen", {"max_seqlen_q": max_q, "window_size": window_size}))
        _check(enable_gqa or query.shape[1] == key.shape[2], "Try setting enable_gqa=True for GQA.")
        _ints(seqused_k, "seqused_k", (len(cu_seq_q) - 1,), query.device)
        lens = seqused_k.tolist()
        _check(_differences(cu_seq_k, "cu_seq_k", query.device) == lens, "cu_seq_k and seqused_k disagree")
        pages = _Pages(self, key, value, block_table, "block_table", self.page_multiple)
        return self._packed(query, pages, cu_seq_q, lens, max_q, max_k, scale, False, window_size, 0.0)

    # --- what they share --------------------------------------------------------------------------------------------

    def _packed(
        self, q: Any, pages: _Pages, cu_seqlens_q: Any, lens: list[int], max_q: int, max_k: int, scale: float | None,
        causal: bool, window: tuple[int, int], softcap: float, *, swaps: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        _check(q.ndim == 3, "q must have shape (total_q, num_heads, head_size)")
        self._queries(q, pages)
        counts = _differences(cu_seqlens_q, "cu_seqlens_q", q.device)
        starts = cu_seqlens_q.tolist()
        _check(len(lens) == len(counts), "cu_seqlens_k must have shape (batch_size + 1)")
        _check(starts[-1] <= len(q), "cu_seqlens_q goes past the queries")
        grouped = q.shape[1] > pages.key.shape[2]
        if swaps and max_q == 1 and grouped and tuple(window) == (-1, -1):
            _check(set(counts) == {1} and len(q) == len(counts), "cu_seqlens_q is ignored: one query each is assumed")
        _check(max(counts) <= max_q, "max_seqlen_q is too small: queries would be dropped")
        _check(max(lens) <= max_k, "max_seqlen_k is too small")
        left, right = self._bounds(causal, window, max_k)
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        for seq, (start, count, length) in enumerate(zip(starts, counts, lens, strict=False)):
            rows = slice(start, start + count)
            out[rows] = pages.attend(seq, q[rows], length, scale, left, right, softcap)
        return out

    def _batched(
        self, q: Any, pages: _Pages, k: Any, v: Any, cache_seqlens: Any, scale: float | None, causal: bool,
        window: tuple[int, int], softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        _check(q.ndim == 4, "q must have shape (batch_size, seqlen_q, num_heads, head_size)")
        self._queries(q, pages)
        batch = len(q)
        _check(
            isinstance(cache_seqlens, torch.Tensor), "an int would be taken as one length for each block of the pool"
        )
        _ints(cache_seqlens, "seqlens_k", (batch,), q.device)
        _check(len(pages.table) == batch, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
        lens = cache_seqlens.tolist()
        _check(min(lens) >= 0, "a negative length")
        _check((k is None) == (v is None), "If key is supplied, value must also be passed in")
        if k is not None:
            pages.append(k, v, lens, q)
            lens = [length + k.shape[1] for length in lens]
        left, right = self._bounds(causal, window, pages.table.shape[1] * pages.size)
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        for seq, length in enumerate(lens):
            out[seq] = pages.attend(seq, q[seq], length, scale, left, right, softcap)
        return out

    def _queries(self, q: Any, pages: _Pages) -> None:
        key = pages.key
        _check(q.dtype in self.dtypes, f"FlashAttention only support {self.dtypes} data type")
        _check(q.dtype == key.dtype, "query and key must have the same dtype")
        _check(q.device == key.device == pages.table.device, "tensors on different devices")
        _check(q.shape[-1] == key.shape[-1], "query and key must have the same head size")
        _check(q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head_size must be a multiple of 8 and at most 256")
        _check(q.shape[-2] % key.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
        _aligned(q, "q")

    @staticmethod
    def _bounds(causal: bool, window: tuple[int, int], max_k: int) -> tuple[int | None, int | None]:
        """How far a query sees to the left and right of its place; None = without end."""
        _check(isinstance(window, tuple) and len(window) == 2, "window_size must be a pair")
        left, right = window
        # The kernel's own shortcut, which is right only where no sequence is longer than max_k.
        left_end = None if left < 0 or left >= max_k else left
        return left_end, 0 if causal else None if right < 0 else right


class _Pages:
    """Keys and values in a pool, seen through block tables."""

    def __init__(self, double: FlashDouble, key: Any, value: Any, table: Any, name: str, multiple: int) -> None:
        _check(table is not None, f"this double is for paged caches: {name} is missing")
        _check(
            key.ndim == 4 and key.shape == value.shape, "k and v must be (num_blocks, page_size, heads_k, head_size)"
        )
        _check(key.dtype == value.dtype, "key and value must have the same dtype")
        _check(key.shape[1] % multiple == 0, f"Paged KV cache block size must be divisible by {multiple}")
        _aligned(key, "k")
        _aligned(value, "v")
        _check(table.dtype == torch.int32, f"{name} must have dtype torch.int32")
        _check(table.ndim == 2 and table.stride(-1) == 1, f"{name} must have contiguous last dimension")
        self.key, self.value, self.table, self.size = key, value, table, key.shape[1]

    def append(self, k: torch.Tensor, v: torch.Tensor, lens: Sequence[int], q: torch.Tensor) -> None:
        """In place, each sequence's tokens at its length. Nobody advances the lengths."""
        shape = (len(q), k.shape[1], *self.key.shape[2:])
        for new, name in ((k, "k"), (v, "v")):
            _check(tuple(new.shape) == shape, f"{name} must have shape (batch_size, seqlen_new, heads_k, head_size)")
            _check(new.dtype == q.dtype, f"{name} must have the same dtype as query")
            _aligned(new, name)
        places: set[tuple[int, int]] = set()
        for seq, length in enumerate(lens):
            for i in range(k.shape[1]):
                page, offset = divmod(length + i, self.size)
                _check(page < self.table.shape[1], "an append past the end of the block table")
                block = int(self.table[seq, page])
                _check(READ_BLOCK < block < len(self.key), f"an append to block {block}")
                _check(block == WRITE_BLOCK or (block, offset) not in places, "two sequences append to one place")
                places.add((block, offset))
                self.key[block, offset], self.value[block, offset] = k[seq, i], v[seq, i]

    def attend(
        self, seq: int, q: torch.Tensor, length: int, scale: float | None, left: int | None, right: int | None,
        softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        """[n, H, D]: the last n of `length` tokens over what they see of them. 0 for a query that sees nothing."""
        count = len(q)
        if not count or not length:
            return torch.zeros_like(q)
        _check(count <= length, "more queries than keys: their own keys are not counted")
        low = 0 if left is None else max(0, length - count - left)
        pages = range(low // self.size, -(-length // self.size))
        _check(pages.stop <= self.table.shape[1], "a length past the end of the block table")
        blocks = self.table[seq, pages.start : pages.stop].long()
        live = bool(((blocks > READ_BLOCK) & (blocks < len(self.key))).all())
        _check(live, f"sequence {seq} reads blocks {blocks.tolist()}, which are not all its own")
        seen = slice(low - pages.start * self.size, length - pages.start * self.size)
        key, value = (x[blocks].flatten(0, 1)[seen].float() for x in (self.key, self.value))
        group = q.shape[1] // key.shape[1]
        scores = torch.einsum("qkgd,tkd->kgqt", q.float().unflatten(1, (key.shape[1], group)), key)
        scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(length - count, length)[:, None]
        distance = torch.arange(low, length) - places
        hidden = torch.zeros(distance.shape, dtype=torch.bool)
        if right is not None:
            hidden |= distance > right
        if left is not None:
            hidden |= distance < -left
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        return torch.einsum("kgqt,tkd->qkgd", scores.softmax(-1), value).flatten(1, 2).to(q.dtype)


def _ints(tensor: Any, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    _check(isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32, f"{name} must have dtype int32")
    _check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}")
    _check(tensor.is_contiguous() and tensor.device == device, f"{name} must be contiguous and on the device")


def _differences(sums: Any, name: str, device: torch.device) -> list[int]:
    _ints(sums, name, (len(sums),), device)
    values = sums.tolist()
    _check(len(values) > 1, "batch size must be positive")
    counts = [after - before for before, after in pairwise(values)]
    _check(values[0] == 0 and min(counts) >= 0, f"{name} must start with 0 and never fall")
    return counts


def _aligned(tensor: torch.Tensor, name: str) -> None:
    """The kernels read 16 bytes at once."""
    _check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1]
    bytes_of = [stride * tensor.element_size() for stride in strides]
    _check(all(n % 16 == 0 for n in bytes_of) and tensor.data_ptr() % 16 == 0, f"{name} is not aligned to 16 bytes")


def install(
    monkeypatch: pytest.MonkeyPatch, *, dtypes: tuple[torch.dtype, ...] = HALF, page_multiple: int = 256
) -> FlashDouble:
    """Put the double in the packages' places, and let the backends take this device and these dtypes and pages."""
    from cbengine.attention.flash import Flash2Backend, FlashBackend
    from cbengine.attention.torch_native import TorchBackend

    double = FlashDouble(dtypes, page_multiple)
    two, three, varlen = ModuleType("flash_attn"), ModuleType("flash_attn_interface"), ModuleType("varlen")
    two.__dict__["flash_attn_varlen_func"] = double.flash_attn_varlen_func
    two.__dict__["flash_attn_with_kvcache"] = double.flash2_with_kvcache
    three.__dict__["flash_attn_with_kvcache"] = double.flash3_with_kvcache
    varlen.__dict__["varlen_attn"] = double.varlen_attn
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", three)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    for backend in (FlashBackend, TorchBackend):
        monkeypatch.setattr(backend, "devices", ("cuda", "cpu"))
        monkeypatch.setattr(backend, "dtypes", dtypes)
    for backend in (Flash2Backend, TorchBackend):
        monkeypatch.setattr(backend, "page_size_multiple", page_multiple)
    return double
