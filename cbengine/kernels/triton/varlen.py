"""Attention of sequences with several query tokens each (prompts, whole or in chunks) over pages.

Each program is one tile of consecutive queries of one sequence, times the query heads of a KV head. Which sequence a program
belongs to is found on the device in `query_starts`, so that a captured launch serves other lengths: the grid is a bound from
the number of tokens and sequences alone (as in vLLM's unified kernel: sequence i owns tiles query_starts[i] // Q + i and up,
and a sequence never needs more of them than there are before the next one's). Sequences with one query token are left alone:
`decode.py` computes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cbengine.kernels.triton.walk import UNALIGNED, VARYING, first_sums, walk, weighted_mean


@triton.jit
def owner(query_starts, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low = tile * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def visible_range(position, last, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Tokens that queries at `position` to `last` see: [low, high); all of them see [full_low, full_high), whole tiles."""
    low, full_low = position * 0, position * 0
    if HAS_WINDOW:
        low = tl.maximum(position - window + 1, 0)
        full_low = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
    full_high = tl.maximum((position + 1) // BLOCK_N * BLOCK_N, full_low)
    return low, full_low, full_high, last + 1


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def varlen_kernel(
    query, key, value, tables, context_lens, query_starts, sinks, out,
    q_token, q_head, kv_block, kv_token, table_stride, num_seqs, scale, window, softcap,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, num_tokens // (BLOCK_M // G) + num_seqs)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tiles of a prompt see most: they start first
    seq = owner(query_starts, tile, num_seqs, BLOCK_Q)
    first = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - first
    start = (tile - (first // BLOCK_Q + seq)) * BLOCK_Q  # this tile's first query, counted in the sequence
    if (count <= 1) | (start >= count):
        return
    context = tl.load(context_lens + seq)
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    heads, at = kv_head * G + r % G, start + r // G
    valid = (at < count) & (r < BLOCK_Q * G)
    mask = valid[:, None] & (d < D)[None, :]
    tokens = (first + at).to(tl.int64)
    q = tl.load(query + (tokens * q_token + heads * q_head)[:, None] + d[None, :], mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    position = context - count + start
    positions = position + r // G
    # Of a padded sequence (context 0) the positions are negative, and the range is empty.
    last = tl.minimum(position + BLOCK_Q, context) - 1
    top, total = first_sums(sinks, heads, valid, BLOCK_M, HAS_SINKS)
    low, full_low, full_high, high = visible_range(position, last, window, BLOCK_N, HAS_WINDOW)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    key, value, table = key + kv_head * D, value + kv_head * D, tables + seq.to(tl.int64) * table_stride
    if HAS_WINDOW:
        top, total, acc = walk(
            q, key, value, table, positions, low, tl.minimum(full_low, high), top, total, acc, kv_block, kv_token,
            scale, window, softcap, D, D_PAD, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )  # fmt: skip
    top, total, acc = walk(
        q, key, value, table, positions, full_low, full_high, top, total, acc, kv_block, kv_token,
        scale, window, softcap, D, D_PAD, PAGE, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip
    top, total, acc = walk(
        q, key, value, table, positions, full_high, high, top, total, acc, kv_block, kv_token,
        scale, window, softcap, D, D_PAD, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip
    result = weighted_mean(acc, total).to(out.dtype.element_ty)
    tl.store(out + (tokens * ROW + heads * D)[:, None] + d[None, :], result, mask=mask)
