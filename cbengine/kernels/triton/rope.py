"""From the product with a layer's query, key and value weights to rotated queries, and to keys and values in their pages.

One pass: norms of heads, rotation, and the writes into the paged cache. Where each token goes is found once for a step.
"""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbengine.cache.geometry import WRITE_BLOCK
from cbengine.kernels.triton.norm import RowNorm, normed_reference

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs

_SEARCH = tl.constexpr(24)  # halvings that find one of up to 2**24 sequences


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer's attention, and what happens to its heads before they are rotated.

    Args:
        query_norm, key_norm: norms of each head [dim], both or neither. `center` is not supported.
        clip: everything is kept within ±clip first, in the model's dtype.
    """

    queries: int
    keys: int
    dim: int
    query_norm: RowNorm | None = None
    key_norm: RowNorm | None = None
    clip: float | None = None


def kv_slots_reference(inputs: StepInputs, page_size: int) -> tuple[Tensor, Tensor]:
    """`kv_slots` in plain torch."""
    tokens = torch.arange(inputs.num_tokens, device=inputs.token_ids.device)
    ends = inputs.query_starts[1 : inputs.num_seqs + 1].contiguous()
    seqs = torch.searchsorted(ends, tokens.to(ends.dtype), right=True)
    in_step = seqs < inputs.num_seqs
    pages = (inputs.positions // page_size).long().clamp(max=inputs.block_tables.shape[1] - 1)
    blocks = inputs.block_tables[seqs.clamp(max=inputs.num_seqs - 1), pages] * in_step
    return blocks.clamp(min=WRITE_BLOCK), inputs.positions % page_size


# What varies from step to step must not select another compiled kernel, which would then be compiled under load.
@triton.jit(
    do_not_specialize=["tokens", "seqs", "width", "table_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "positions_ptr", "tables_ptr", "offsets_ptr"],
)
def _slots_kernel(
    starts_ptr,
    positions_ptr,
    tables_ptr,
    blocks_ptr,
    offsets_ptr,
    tokens,
    seqs,
    width,
    table_stride,
    PAGE: tl.constexpr,
    RESERVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    low = tl.zeros([BLOCK], tl.int32)
    high = low + seqs
    for _ in range(_SEARCH):
        # The first sequence that ends after the token; `seqs` if there is none.
        middle = (low + high) // 2
        end = tl.load(starts_ptr + middle + 1, mask=inside & (low < high), other=0)
        after = end <= token
        going = low < high
        low = tl.where(going & after, middle + 1, low)
        high = tl.where(going & (end > token), middle, high)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    page = tl.minimum(position // PAGE, width - 1)
    own = inside & (low < seqs)
    block = tl.load(tables_ptr + low.to(tl.int64) * table_stride + page, mask=own, other=0)
    tl.store(blocks_ptr + token, tl.maximum(block, RESERVED), mask=inside)
    tl.store(offsets_ptr + token, position % PAGE, mask=inside)


def kv_slots(inputs: StepInputs, page_size: int) -> tuple[Tensor, Tensor]:
    """Block and offset, int32 [T] each, that the keys and values of every token are written to.

    As `attention.base.write_index`: padded tokens go to the reserved block. Reads no device tensor on the host.
    """
    tokens, tables = inputs.num_tokens, inputs.block_tables
    blocks, offsets = torch.empty(2, tokens, dtype=torch.int32, device=inputs.token_ids.device)
    assert inputs.num_seqs < 1 << _SEARCH.value and tables.stride(1) == 1
    if tokens:
        _slots_kernel[(triton.cdiv(tokens, 128),)](
            inputs.query_starts,
            inputs.positions,
            tables,
            blocks,
            offsets,
            tokens,
            inputs.num_seqs,
            tables.shape[1],
            tables.stride(0),
            PAGE=page_size,
            RESERVED=WRITE_BLOCK,
            BLOCK=128,
            num_warps=4,
        )
    return blocks, offsets


def rotate_and_write_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor
) -> Tensor:
    """`rotate_and_write` in plain torch."""
    if heads.clip is not None:
        qkv = qkv.clamp(-heads.clip, heads.clip)
    parts = qkv.unflatten(-1, (-1, heads.dim)).split([heads.queries, heads.keys, heads.keys], dim=1)
    q, k = (
        x if norm is None else normed_reference(x, norm)
        for x, norm in zip(parts, (heads.query_norm, heads.key_norm), strict=False)
    )

    def rotate(x: Tensor) -> Tensor:
        n = cos.shape[1]
        turned, rest = x[..., :n], x[..., n:]
        half = torch.cat((-turned[..., n // 2 :], turned[..., : n // 2]), dim=-1)
        return torch.cat(((turned * cos[:, None] + half * sin[:, None]).to(x.dtype), rest), dim=-1)

    key[blocks.long(), offsets.long()] = rotate(k)
    value[blocks.long(), offsets.long()] = parts[2]
    return rotate(q)


@triton.jit
def _rounded(x, dtype: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        return x.to(dtype).to(tl.float32)
    return x


@triton.jit
def _scaled(x, factor, weight, SHIFT: tl.constexpr, FIRST: tl.constexpr, dtype: tl.constexpr):
    x = x * factor
    if FIRST:
        x = x.to(dtype).to(tl.float32)
    if SHIFT:
        weight = weight + 1.0
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _head_weights(query_ptr, key_ptr, at, inside, is_query):
    """Both norms' weights at these elements, each row with its own."""
    q = tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


@triton.jit
def _clipped(x, clip, CLIP: tl.constexpr):
    if CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    return x


@triton.jit
def _put(x, at, inside, is_query, is_key, is_value, query_ptr, key_ptr, value_ptr, q_rows, kv_rows):
    """A tile of heads to the three places that they belong to."""
    x = x.to(query_ptr.dtype.element_ty)
    tl.store(query_ptr + q_rows[:, None] + at[None, :], x, mask=is_query[:, None] & inside[None, :])
    tl.store(key_ptr + kv_rows[:, None] + at[None, :], x, mask=is_key[:, None] & inside[None, :])
    tl.store(value_ptr + kv_rows[:, None] + at[None, :], x, mask=is_value[:, None] & inside[None, :])


@triton.jit
def _turned(a, b, cos_ptr, sin_ptr, at, in_half, HALF: tl.constexpr, ROUND: tl.constexpr, dtype: tl.constexpr):
    """Both halves of the heads' rotated elements, by the angles of their token."""
    cos_a = tl.load(cos_ptr + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + at + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + at + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned_a = _rounded(a * cos_a, dtype, ROUND) - _rounded(b * sin_a, dtype, ROUND)
    return turned_a, _rounded(b * cos_b, dtype, ROUND) + _rounded(a * sin_b, dtype, ROUND)


# fmt: off
@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "offsets_ptr"])
def _rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, query_ptr, key_ptr, value_ptr, blocks_ptr, offsets_ptr,
    qkv_stride, angle_stride, block_stride, page_stride, head_stride, query_eps, key_eps, clip,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, CLIP: tl.constexpr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, ROUND: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """One token, HEADS_BLOCK heads: queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    is_query, is_value = head < QUERIES, (head >= QUERIES + KEYS) & (head < QUERIES + 2 * KEYS)
    is_key = (head >= QUERIES) & (head < QUERIES + KEYS)
    exists = head < QUERIES + 2 * KEYS
    block = tl.load(blocks_ptr + token).to(tl.int64)
    offset = tl.load(offsets_ptr + token).to(tl.int64)
    q_rows = (token * QUERIES + head) * DIM
    kv_head = tl.where(is_value, head - QUERIES - KEYS, head - QUERIES)
    kv_rows = block * block_stride + offset * page_stride + kv_head * head_stride
    rows = token * qkv_stride + head * DIM
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    low = tl.arange(0, HALF_BLOCK)
    in_half = low < HALF
    loads = exists[:, None] & in_half[None, :]
    a = tl.load(qkv_ptr + rows[:, None] + low[None, :], mask=loads, other=0.0).to(tl.float32)
    b = tl.load(qkv_ptr + rows[:, None] + (HALF + low)[None, :], mask=loads, other=0.0).to(tl.float32)
    a, b = _clipped(a, clip, CLIP), _clipped(b, clip, CLIP)
    raw_a, raw_b = a, b
    squares = tl.sum(a * a + b * b, 1)
    if REST_BLOCK > 0:
        high = 2 * HALF + tl.arange(0, REST_BLOCK)
        in_rest = high < DIM
        c = tl.load(qkv_ptr + rows[:, None] + high[None, :], mask=exists[:, None] & in_rest[None, :], other=0.0)
        c = _clipped(c.to(tl.float32), clip, CLIP)
        squares += tl.sum(c * c, 1)
        if NORM:
            factor_c = tl.rsqrt(squares / DIM + tl.where(is_query, query_eps, key_eps))
            weight = _head_weights(query_norm_ptr, key_norm_ptr, high, in_rest, is_query)
            c = tl.where(is_value[:, None], c, _scaled(c, factor_c[:, None], weight, SHIFT, FIRST, dtype))
        _put(c, high, in_rest, is_query, is_key, is_value, query_ptr, key_ptr, value_ptr, q_rows, kv_rows)
    if NORM:
        factor = tl.rsqrt(squares / DIM + tl.where(is_query, query_eps, key_eps))[:, None]
        weight_a = _head_weights(query_norm_ptr, key_norm_ptr, low, in_half, is_query)
        weight_b = _head_weights(query_norm_ptr, key_norm_ptr, HALF + low, in_half, is_query)
        a = _scaled(a, factor, weight_a, SHIFT, FIRST, dtype)
        b = _scaled(b, factor, weight_b, SHIFT, FIRST, dtype)
    turned_a, turned_b = _turned(a, b, cos_ptr, sin_ptr, token * angle_stride + low, in_half, HALF, ROUND, dtype)
    turned_a = tl.where(is_value[:, None], raw_a, turned_a)
    turned_b = tl.where(is_value[:, None], raw_b, turned_b)
    _put(turned_a, low, in_half, is_query, is_key, is_value, query_ptr, key_ptr, value_ptr, q_rows, kv_rows)
    _put(turned_b, HALF + low, in_half, is_query, is_key, is_value, query_ptr, key_ptr, value_ptr, q_rows, kv_rows)
# fmt: on


def rotate_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor
) -> Tensor:
    """Rotated queries [T, queries, dim]; keys and values go into their pages. Compute stream.

    Args:
        qkv: [T, (queries + 2 * keys) * dim], contiguous rows: queries, keys, values.
        cos, sin: [T, rotary], as the model's rotary embedding gives them: in the model's dtype (then products are rounded
            to it) or in float32 (then only the result is). The first `rotary` elements of a head are rotated.
        key, value: [num_blocks, page_size, keys, dim] with equal strides, contiguous heads.
        blocks, offsets: int32 [T], see `kv_slots`.
    """
    tokens, dim, half = qkv.shape[0], heads.dim, cos.shape[1] // 2
    assert qkv.stride(1) == 1 and qkv.shape[1] == (heads.queries + 2 * heads.keys) * dim, qkv.shape
    assert key.stride() == value.stride() and key.stride(3) == 1 and key.dtype == qkv.dtype
    assert cos.shape == sin.shape == (tokens, 2 * half) and cos.stride() == sin.stride() and cos.stride(1) == 1
    query = torch.empty(tokens, heads.queries, dim, dtype=qkv.dtype, device=qkv.device)
    normed = heads.query_norm is not None and heads.key_norm is not None
    q_norm, k_norm = heads.query_norm or RowNorm(qkv, 0.0), heads.key_norm or RowNorm(qkv, 0.0)
    total, rest = heads.queries + 2 * heads.keys, dim - 2 * half
    half_block = triton.next_power_of_2(half)
    heads_block = min(triton.next_power_of_2(total), max(1, 1024 // half_block))
    if tokens:
        # fmt: off
        _rope_kernel[(tokens, triton.cdiv(total, heads_block))](
            qkv, cos, sin, q_norm.weight, k_norm.weight, query, key, value, blocks, offsets,
            qkv.stride(0), cos.stride(0), *key.stride()[:3], q_norm.eps, k_norm.eps,
            0.0 if heads.clip is None else heads.clip,
            QUERIES=heads.queries, KEYS=heads.keys, DIM=dim, HALF=half, CLIP=heads.clip is not None,
            NORM=normed, SHIFT=q_norm.shift, FIRST=q_norm.round_first,
            ROUND=cos.dtype == qkv.dtype and qkv.dtype != torch.float32,
            HEADS_BLOCK=heads_block, HALF_BLOCK=half_block, num_warps=4,
            REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        )
        # fmt: on
    return query
