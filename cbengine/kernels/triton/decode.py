"""Attention of sequences with one query token each, the cached tokens split over programs (flash-decoding).

All query heads of a KV head are one program, so that keys and values are read once. With more than one split the programs
leave partial results in a workspace, and a second kernel merges them. Sequences with another number of query tokens in the
step are left alone: `varlen.py` computes them. Tokens past the last sequence become zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cbengine.kernels.triton.walk import LOG2E, UNALIGNED, VARYING, first_sums, walk, weighted_mean


@triton.jit
def clear_padding(
    out, query_starts, seq, num_seqs, num_tokens, first_head,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROW: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Zeros for tokens past the last sequence: program `seq` takes every num_seqs-th of them."""
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    mask = (r < G)[:, None] & (d < D)[None, :]
    zeros = tl.zeros([BLOCK_M, D_PAD], out.dtype.element_ty)
    places = out + (first_head + r)[:, None] * D + d[None, :]
    wide = tl.zeros([], tl.int64)
    for token in range(tl.load(query_starts + num_seqs) + seq, num_tokens, num_seqs):
        tl.store(places + (wide + token) * ROW, zeros, mask=mask)


@triton.jit
def split_range(
    context, split, num_splits, window, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The tokens [low, high) of one split of the last `window` tokens. Ends at tile borders; later ones may be empty."""
    low = context * 0
    if HAS_WINDOW:
        low = tl.maximum(context - window, 0)
    high = context
    if SPLIT:
        first_tile = low // BLOCK_N
        tiles = tl.cdiv(tl.cdiv(context, BLOCK_N) - first_tile, num_splits)
        begin = (first_tile + split * tiles) * BLOCK_N
        high = tl.minimum(begin + tiles * BLOCK_N, context)
        low = tl.maximum(begin, low)
    return low, high


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    query, key, value, tables, context_lens, query_starts, sinks, out, part_acc, part_sums,
    q_token, q_head, kv_block, kv_token, table_stride, num_tokens, num_splits, scale, window, softcap,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, sequences, splits). Without SPLIT writes `out` [tokens, heads, D], else its part of the workspace."""
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not SPLIT:
        clear_padding(out, query_starts, seq, tl.num_programs(1), num_tokens, kv_head * G, G, D, D_PAD, ROW, BLOCK_M)
    first = tl.load(query_starts + seq)
    if tl.load(query_starts + seq + 1) - first != 1:
        return
    context = tl.load(context_lens + seq)
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    mask = (r < G)[:, None] & (d < D)[None, :]
    heads = kv_head * G + r
    q = tl.load(query + first.to(tl.int64) * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    low, high = split_range(context, split, num_splits, window, BLOCK_N, SPLIT, HAS_WINDOW)  # pyright: ignore[reportGeneralTypeIssues]
    positions = tl.zeros([BLOCK_M], tl.int32) + (context - 1)
    # With splits the sinks count once, when the parts are merged.
    top, total = first_sums(sinks, heads, r < G, BLOCK_M, HAS_SINKS and not SPLIT)
    top, total, acc = walk(
        q, key + kv_head * D, value + kv_head * D, tables + seq.to(tl.int64) * table_stride, positions, low, high,
        top, total, tl.zeros([BLOCK_M, D_PAD], tl.float32), kv_block, kv_token, scale, window, softcap,
        D, D_PAD, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip
    if SPLIT:
        part = (seq * tl.num_programs(0) * G + heads) * num_splits + split
        tl.store(part_acc + part[:, None] * D + d[None, :], acc, mask=mask)
        tl.store(part_sums + part * 2, top, mask=r < G)
        tl.store(part_sums + part * 2 + 1, total, mask=r < G)
    else:
        result = weighted_mean(acc, total).to(out.dtype.element_ty)
        tl.store(out + first.to(tl.int64) * ROW + heads[:, None] * D + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def merge_kernel(
    part_acc, part_sums, query_starts, sinks, out, num_tokens, num_splits,
    D: tl.constexpr, D_PAD: tl.constexpr, ROW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, sequences): the splits of one head, `CHUNK` at a time. Splits that saw nothing have maximum -inf."""
    head, seq = tl.program_id(0), tl.program_id(1)
    clear_padding(out, query_starts, seq, tl.num_programs(1), num_tokens, head, 1, D, D_PAD, ROW, 1)
    first = tl.load(query_starts + seq)
    if tl.load(query_starts + seq + 1) - first != 1:
        return
    c, d = tl.arange(0, CHUNK), tl.arange(0, D_PAD)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = top * 0.0 + 1.0
    else:
        top = -float("inf") + tl.zeros([], tl.float32)
        total = tl.zeros([], tl.float32)
    acc = tl.zeros([D_PAD], tl.float32)
    for start in range(0, num_splits, CHUNK):
        part = (seq * tl.num_programs(0) + head) * num_splits + start + c
        there = start + c < num_splits
        tops = tl.load(part_sums + part * 2, mask=there, other=-float("inf"))
        sums = tl.load(part_sums + part * 2 + 1, mask=there, other=0.0)
        parts = tl.load(
            part_acc + part[:, None] * D + d[None, :],
            mask=(tops > -float("inf"))[:, None] & (d < D)[None, :],
            other=0.0,
        )
        highest = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        shares = tl.exp2(tops - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(sums * shares, 0)
        acc = acc * shrink + tl.sum(parts * shares[:, None], 0)
        top = highest
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + first.to(tl.int64) * ROW + head * D + d, acc.to(out.dtype.element_ty), mask=d < D)
