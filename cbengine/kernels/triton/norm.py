"""RMS and layer norms of whole rows, with what stands before them in a transformer: an addition, another norm.

Arithmetic is transformers': float32 within a norm, and a rounding to the model's dtype wherever its modules hand a tensor on.
"""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 1 << 14
"""Longest row: a program holds a whole one in registers."""


@dataclass(frozen=True, slots=True)
class RowNorm:
    """One norm. `weight` [width] in the model's dtype, or None for 1.

    Args:
        shift: the factor is 1 + weight, in float32 (Gemma).
        round_first: the normed row is rounded to its dtype before it is multiplied (Llama), and not only after (OLMo 2).
        center: the mean is taken off first: a layer norm.
    """

    weight: Tensor | None
    eps: float
    shift: bool = False
    round_first: bool = False
    center: bool = False


def normed_reference(x: Tensor, norm: RowNorm) -> Tensor:
    """One norm over the last dimension, in plain torch."""
    y = x.float()
    if norm.center:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.weight is None:
        return y.to(x.dtype)
    if norm.round_first:
        return (y.to(x.dtype) * norm.weight).to(x.dtype)
    weight = norm.weight.float()
    return (y * (1.0 + weight if norm.shift else weight)).to(x.dtype)


def join_reference(
    residual: Tensor | None, x: Tensor, after: RowNorm | None, before: RowNorm | None
) -> tuple[Tensor, Tensor]:
    """`join` in plain torch."""
    y = x if after is None else normed_reference(x, after)
    total = y if residual is None else residual + y
    return total, total if before is None else normed_reference(total, before)


@triton.jit
def normed(
    x, weight, eps, width, inside, SHIFT: tl.constexpr, FIRST: tl.constexpr, CENTER: tl.constexpr, dtype: tl.constexpr
):
    """One row in float32, zeros outside; rounded to `dtype`, and float32 again."""
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if FIRST:
        x = x.to(dtype).to(tl.float32)
    if SHIFT:
        weight = weight + 1.0
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _join_kernel(
    residual_ptr,
    x_ptr,
    after_ptr,
    before_ptr,
    total_ptr,
    out_ptr,
    x_stride,
    out_stride,
    after_eps,
    before_eps,
    width,
    ADD: tl.constexpr,
    AFTER: tl.constexpr,
    AFTER_WEIGHT: tl.constexpr,
    AFTER_SHIFT: tl.constexpr,
    AFTER_FIRST: tl.constexpr,
    AFTER_CENTER: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    BEFORE_SHIFT: tl.constexpr,
    BEFORE_FIRST: tl.constexpr,
    BEFORE_CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if AFTER:
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if AFTER_WEIGHT:
            weight = tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = normed(x, weight, after_eps, width, inside, AFTER_SHIFT, AFTER_FIRST, AFTER_CENTER, dtype)
    if ADD:
        x = x + tl.load(residual_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(total_ptr + row * width + at, x.to(dtype), mask=inside)
    if BEFORE:
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if BEFORE_WEIGHT:
            weight = tl.load(before_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = normed(x, weight, before_eps, width, inside, BEFORE_SHIFT, BEFORE_FIRST, BEFORE_CENTER, dtype)
    if BEFORE or not ADD:
        tl.store(out_ptr + row * out_stride + at, x.to(dtype), mask=inside)


def join(
    residual: Tensor | None,
    x: Tensor,
    after: RowNorm | None,
    before: RowNorm | None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`total = residual + after(x)` and `before(total)`, in one pass over the rows. Compute stream.

    Args:
        residual: [T, width] contiguous, or None for no addition.
        x: [T, width], whose rows are contiguous; may be a part of wider rows.
        after, before: norms, None for none. With neither a residual nor a norm there is nothing to do.
        out: where the normed rows go, strided as `x`; may be `x` itself. Default: a new tensor.

    Returns:
        total and normed, [T, width]; the same tensor where one of the two is all there is.
    """
    rows, width = x.shape
    assert x.stride(1) == 1 and width <= MAX_WIDTH, (x.shape, x.stride())
    assert residual is None or residual.is_contiguous()
    if residual is None and after is None and before is None:
        return x, x
    total = x if residual is None else torch.empty_like(residual)
    normed_rows = out if out is not None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is not None and before is None:
        normed_rows = total
    if rows:
        _launch(residual, x, after, before, total, normed_rows)
    return (normed_rows if residual is None and before is None else total), normed_rows


def _launch(
    residual: Tensor | None,
    x: Tensor,
    after: RowNorm | None,
    before: RowNorm | None,
    total: Tensor,
    out: Tensor,
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    nothing = RowNorm(None, 0.0)
    first, last = after or nothing, before or nothing
    _join_kernel[(rows,)](
        x if residual is None else residual,
        x,
        x if first.weight is None else first.weight,
        x if last.weight is None else last.weight,
        total,
        out,
        x.stride(0),
        out.stride(0),
        first.eps,
        last.eps,
        width,
        ADD=residual is not None,
        AFTER=after is not None,
        AFTER_WEIGHT=first.weight is not None,
        AFTER_SHIFT=first.shift,
        AFTER_FIRST=first.round_first,
        AFTER_CENTER=first.center,
        BEFORE=before is not None,
        BEFORE_WEIGHT=last.weight is not None,
        BEFORE_SHIFT=last.shift,
        BEFORE_FIRST=last.round_first,
        BEFORE_CENTER=last.center,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )


def norm(x: Tensor, norm: RowNorm, *, out: Tensor | None = None) -> Tensor:
    """One norm over the rows of `x` [T, width]; `out` may be `x` itself. Compute stream."""
    return join(None, x, None, norm, out=out)[1]
