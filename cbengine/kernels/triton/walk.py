"""What the attention kernels share: the walk of a tile of queries over the pages of one sequence.

A tile is `BLOCK_M` rows (query heads of one KV head, of one or several query tokens); it walks over `BLOCK_N` cached tokens
at a time with a running maximum and sum (the online softmax of FlashAttention; scores are in units of log2). Head sizes that
are no power of two are padded to `D_PAD` in registers. Pages may be of any size: where a page is a multiple of `BLOCK_N` one
entry of the block table is read for each tile, else one for each token.

Invariants, each of which a published kernel has broken:
- Offsets into the pool are 64 bits wide from the block number on: a pool has more than 2**31 elements.
- Nothing outside the tokens [low, high) that a call was given is read, neither pages nor entries of the block table: pages
  behind a window are somebody else's by now and unwritten ones may hold NaN, and 0 * NaN is NaN.
- A row that sees no token has maximum -inf and sum 0, never NaN (-inf - -inf).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# Numbers and addresses that change from step to step must not select another compiled kernel, which would be compiled under
# load: Triton otherwise has variants for 1, for multiples of 16, and for addresses that are multiples of 16 bytes.
VARYING = ("table_stride", "num_tokens", "num_seqs", "num_splits", "window")
UNALIGNED = ("tables", "context_lens", "query_starts", "sinks")


@triton.jit
def soft_cap(scores, softcap):
    """softcap * tanh(scores / softcap). Where the exponential overflows, 2 / inf is 0: no inf / inf."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit
def first_sums(sinks, heads, mask, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """(top, total) of each row before it has seen a token: a sink is a score that no value belongs to."""
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * LOG2E
        total = total + 1.0
    return top, total


@triton.jit
def weighted_mean(acc, total):
    """The softmax's result of each row; 0 where a row saw nothing (its `acc` is 0)."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def row_offsets(
    table, tile, t, inside, kv_block, kv_token, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):
    """int64 [BLOCK_N]: where the tokens `t` of a tile are in the pool, in elements."""
    if PAGE % BLOCK_N == 0:
        # The whole tile is in one page, and at least one of its tokens is inside.
        blocks = tl.load(table + tile * BLOCK_N // PAGE)
    elif MASKED:
        blocks = tl.load(table + t // PAGE, mask=inside, other=0)
    else:
        blocks = tl.load(table + t // PAGE)
    return blocks.to(tl.int64) * kv_block + (t % PAGE) * kv_token


@triton.jit
def load_tile(base, rows, inside, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK_N, D_PAD]: zeros outside."""
    d = tl.arange(0, D_PAD)
    pointers = base + rows[:, None] + d[None, :]
    if MASKED and D == D_PAD:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif D == D_PAD:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    return tile


@triton.jit
def walk(
    q, key, value, table, positions, low, high, top, total, acc, kv_block, kv_token, scale, window, softcap,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend over tokens [low, high). `q` [BLOCK_M, D_PAD], `positions` int32 [BLOCK_M]; returns (top, total, acc).

    `key`, `value`: at the KV head's first element. Not MASKED: every row sees every token, and low and high are multiples of
    BLOCK_N.
    """
    n = tl.arange(0, BLOCK_N)
    for tile in range(low // BLOCK_N, tl.cdiv(high, BLOCK_N)):
        t = tile * BLOCK_N + n
        inside = (t >= low) & (t < high)
        rows = row_offsets(table, tile, t, inside, kv_block, kv_token, PAGE, BLOCK_N, MASKED)
        k = load_tile(key, rows, inside, D, D_PAD, MASKED)
        v = load_tile(value, rows, inside, D, D_PAD, MASKED)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = soft_cap(scores * scale, softcap) * LOG2E if HAS_SOFTCAP else scores * (scale * LOG2E)
        if MASKED:
            visible = inside[None, :] & (t[None, :] <= positions[:, None])
            if HAS_WINDOW:
                visible = visible & (t[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = highest
    return top, total, acc
