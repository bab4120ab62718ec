"""Launching the attention kernels. Compute stream's thread; reads no device tensor, and only bounds of lengths."""

# A launch takes plain numbers for constants, which a type checker does not know.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from cbengine.kernels.triton.decode import decode_kernel, merge_kernel
from cbengine.kernels.triton.pages import write_kernel
from cbengine.kernels.triton.tiles import (
    MERGE,
    decode_tile,
    most_split_programs,
    padded_dim,
    power_of_two,
    splits_for,
    varlen_tile,
)
from cbengine.kernels.triton.varlen import varlen_kernel

INTERPRETED: bool = knobs.runtime.interpret
"""The kernels of this process run in Triton's interpreter, on tensors of the CPU. As read when this module was loaded."""
_INTERPRETED_MULTIPROCESSORS = 4


@dataclass(slots=True)
class PagedStep:
    """What the kernels need of a step. The tensors are int32 on the device, and may hold other lengths at each replay.

    `max_query_len` and `max_context_len` are bounds: those of the bucket where the launches are captured. The number of
    decoding sequences is not needed: which kernel computes a sequence is decided on the device.
    """

    tables: torch.Tensor
    """[S, W], rows contiguous."""
    context_lens: torch.Tensor
    """[S]"""
    query_starts: torch.Tensor
    """[S + 1]"""
    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_context_len: int
    page_size: int


class Workspace:
    """Partial results of split decoding: fixed float32 memory, made before the first step and never in one.

    Bytes: about 6 * multiprocessors * (heads / kv heads) * (head_dim + 2) * 4; 3 MB for 8 heads of 128 on an H200.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, device: torch.device, multiprocessors: int | None = None
    ) -> None:
        self.multiprocessors = multiprocessors or _multiprocessors(device)
        parts = most_split_programs(kv_heads, self.multiprocessors) * (heads // kv_heads)
        self.acc = torch.empty(parts, head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(parts, 2, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of products: see `AttentionBackend.attend`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def write_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Put `key` and `value` [T, kv heads, D] into pages [blocks, page_size, kv heads, D], which have equal strides.

    `blocks`, `offsets`: int32 [T], as `rope.kv_slots` gives them.
    """
    heads, dim = key_pages.shape[2:]
    key, value = _dense_heads(key), _dense_heads(value)
    if blocks.shape[0]:
        write_kernel[(blocks.shape[0],)](
            key, value, key_pages, value_pages, blocks, offsets, key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), key_pages.stride(0), key_pages.stride(1), HEADS=heads, D=dim,
            WIDTH_PAD=power_of_two(heads * dim),
        )  # fmt: skip


def attend_pages(
    step: PagedStep,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    workspace: Workspace,
    scores: Scores,
) -> torch.Tensor:
    """Causal attention of `query` [T, heads, D] over each sequence's pages; see `attend_pages_reference`."""
    query = _dense_heads(query)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if step.num_tokens and step.num_seqs:
        tokens = min(step.max_context_len, scores.window or step.max_context_len)
        splits = splits_for(step.num_seqs, key_pages.shape[2], tokens, workspace.multiprocessors)
        launch_decode(step, query, key_pages, value_pages, out, workspace, scores, splits)
        if step.max_query_len > 1:
            launch_varlen(step, query, key_pages, value_pages, out, scores)
    else:
        out.zero_()
    return out


def compile_kinds(
    step: PagedStep,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    workspace: Workspace,
    scores: Scores,
) -> None:
    """Launch every attention kernel that steps of this kind of layer may need, whole and split. The results are dropped."""
    query = _dense_heads(query)
    if step.num_tokens and step.num_seqs:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        fits = step.num_seqs * query.shape[1] * 2 <= workspace.acc.shape[0]
        for splits in (1, 2) if fits else (1,):
            launch_decode(step, query, key_pages, value_pages, out, workspace, scores, splits)
        launch_varlen(step, query, key_pages, value_pages, out, scores)


def launch_decode(
    step: PagedStep,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    scores: Scores,
    splits: int,
) -> None:
    """The sequences with one query token, and zeros for tokens past the last sequence."""
    heads, dim = query.shape[1:]
    kv_heads = key_pages.shape[2]
    tile = decode_tile(query.dtype, dim, heads // kv_heads)
    assert splits == 1 or step.num_seqs * heads * splits <= workspace.acc.shape[0], (step.num_seqs, splits)
    sinks = query if scores.sinks is None else scores.sinks
    common = {"D": dim, "D_PAD": padded_dim(dim), "ROW": heads * dim, "HAS_SINKS": scores.sinks is not None}
    decode_kernel[(kv_heads, step.num_seqs, splits)](
        query, key_pages, value_pages, step.tables, step.context_lens, step.query_starts, sinks, out,
        workspace.acc, workspace.sums, query.stride(0), query.stride(1), key_pages.stride(0), key_pages.stride(1),
        step.tables.stride(0), step.num_tokens, splits, scores.scale, scores.window or 0, scores.softcap or 0.0,
        G=heads // kv_heads, PAGE=step.page_size, BLOCK_M=tile.rows, BLOCK_N=tile.tokens, SPLIT=splits > 1,
        HAS_WINDOW=scores.window is not None, HAS_SOFTCAP=scores.softcap is not None,
        UPCAST=_upcasts(query), **common, **tile.options,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(heads, step.num_seqs)](
            workspace.acc, workspace.sums, step.query_starts, sinks, out, step.num_tokens, splits,
            CHUNK=MERGE.tokens, **common, **MERGE.options,
        )  # fmt: skip


def launch_varlen(
    step: PagedStep,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    out: torch.Tensor,
    scores: Scores,
) -> None:
    """The sequences with two query tokens or more."""
    heads, dim = query.shape[1:]
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    tile = varlen_tile(query.dtype, dim, group)
    varlen_kernel[(kv_heads, step.num_tokens // (tile.rows // group) + step.num_seqs)](
        query, key_pages, value_pages, step.tables, step.context_lens, step.query_starts,
        query if scores.sinks is None else scores.sinks, out, query.stride(0), query.stride(1),
        key_pages.stride(0), key_pages.stride(1), step.tables.stride(0), step.num_seqs, scores.scale,
        scores.window or 0, scores.softcap or 0.0, G=group, D=dim, D_PAD=padded_dim(dim), ROW=heads * dim,
        PAGE=step.page_size, BLOCK_M=tile.rows, BLOCK_N=tile.tokens, HAS_WINDOW=scores.window is not None,
        HAS_SOFTCAP=scores.softcap is not None, HAS_SINKS=scores.sinks is not None, UPCAST=_upcasts(query),
        **tile.options,
    )  # fmt: skip


def _upcasts(query: torch.Tensor) -> bool:
    """The interpreter's products of bfloat16 are wrong (Triton 3.6 to 3.9): there they are made in float32."""
    return INTERPRETED and query.dtype == torch.bfloat16


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED:
        return _INTERPRETED_MULTIPROCESSORS
    utilities: Any = driver.active.utils  # type: ignore[attr-defined]
    return utilities.get_device_properties(device.index or 0)["multiprocessor_count"]
