"""Greedy choice and random draws over whole vocabularies, in a few launches and without temporaries of their size.

The arithmetic is that of `cbengine.execution.sampler`: probabilities are kept as multiples of a power of two so coarse that
every sum is exact in float64, so that a token depends neither on the batch nor on the order of a sum. Fused are: the choice
of the best token; temperature, min_p and the draw as a whole; and for top_k and top_p the weights before and the draw after
the search for their boundary, which stays torch's (a radix search in one program for each row would leave a GPU idle at
small batches, and gain little at large ones).
"""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Tokens of one row that a program weighs; sums of weights are kept for each so many."""
_MOST_SPLITS = 32  # programs that look for the best token of one row


# Parameters are parts of a slot's buffer, which lie anywhere in it: that must not select another compiled kernel
# (`do_not_specialize_on_alignment`).


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of each row, [N]: see `SamplingInputs`. All of them are on the logits' device."""

    temperature: Tensor
    min_p: Tensor
    uniform: Tensor
    random: bool
    """Some row is not greedy."""
    min_p_used: bool


@triton.jit
def _score(logits_ptr, at, inside, temperature):
    """Logits over the temperature, as float32 division rounds it; -inf outside."""
    x = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    warm = temperature > 0.0
    divisor = tl.where(warm, tl.minimum(tl.maximum(temperature, 1e-30), 3.4028234663852886e38), 1.0)
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def _key(score):
    """An int32 ordered as the scores are; NaN is the largest, and -0.0 is 0.0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "logits_ptr"])
def _best_kernel(
    logits_ptr, temperature_ptr, keys_ptr, index_ptr, stride, vocab, per_split, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """The best token of one part of a row, the lowest id of equals."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    best = tl.full([TILE], -0x80000000, tl.int32)
    found = tl.zeros([TILE], tl.int32)
    end = tl.minimum((split + 1) * per_split, vocab)
    for start in range(split * per_split, end, TILE):
        at = start + tl.arange(0, TILE)
        key = _key(_score(logits_ptr + row * stride, at, at < end, temperature))
        better = (key > best) & (at < end)
        best = tl.where(better, key, best)
        found = tl.where(better, at, found)
    top = tl.max(best, 0)
    tl.store(keys_ptr + row * SPLITS + split, top)
    tl.store(index_ptr + row * SPLITS + split, tl.min(tl.where(best == top, found, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "logits_ptr"])
def _pick_kernel(
    logits_ptr, temperature_ptr, keys_ptr, index_ptr, token_ptr, score_ptr, stride, vocab, SPLITS: tl.constexpr
):
    """The best of a row's parts, and its score."""
    row = tl.program_id(0).to(tl.int64)
    at = row * SPLITS + tl.arange(0, SPLITS)
    keys = tl.load(keys_ptr + at)
    token = tl.min(tl.where(keys == tl.max(keys, 0), tl.load(index_ptr + at), 0x7FFFFFFF), 0)
    token = tl.minimum(token, vocab - 1)
    tl.store(token_ptr + row, token)
    one = tl.arange(0, 1)
    score = _score(logits_ptr + row * stride, token + one, one < 1, tl.load(temperature_ptr + row))
    tl.store(score_ptr + row + one, score)


@triton.jit
def _weight(score, best, min_p, shift, MIN_P: tl.constexpr):
    """exp(score - best) as a multiple of the last bit of a float64 of `shift`'s size; 0 where min_p takes the token away."""
    ratio = tl.exp((score - best).to(tl.float64)).to(tl.float32)
    weight = (ratio.to(tl.float64) + shift) - shift
    if MIN_P:
        weight = tl.where(ratio < min_p, 0.0, weight)
    return weight


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr", "logits_ptr"])
def _weigh_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    best_ptr,
    scores_ptr,
    weights_ptr,
    sums_ptr,
    stride,
    vocab,
    blocks,
    shift,
    MIN_P: tl.constexpr,
    STORE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The weights of one block of a row: their sum, and with STORE scores and weights themselves."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * SIZE + tl.arange(0, SIZE)
    inside = at < vocab
    score = _score(logits_ptr + row * stride, at, inside, tl.load(temperature_ptr + row))
    weight = _weight(score, tl.load(best_ptr + row), tl.load(min_p_ptr + row), shift, MIN_P)
    weight = tl.where(inside, weight, 0.0)
    if STORE:
        tl.store(scores_ptr + row * vocab + at, score, mask=inside)
        tl.store(weights_ptr + row * blocks * SIZE + at, weight)
    tl.store(sums_ptr + row * blocks + block, tl.sum(weight, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr", "uniform_ptr", "logits_ptr"])
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    best_ptr,
    token_ptr,
    weights_ptr,
    sums_ptr,
    out_ptr,
    stride,
    vocab,
    blocks,
    shift,
    MIN_P: tl.constexpr,
    STORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The first token up to which a row's weights sum to more than its share: first the block, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    at_block = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + row * blocks + at_block, mask=at_block < blocks, other=0.0)
    total = tl.sum(sums, 0)
    uniform = tl.minimum(tl.maximum(tl.load(uniform_ptr + row), 0.0), 0.999999940395355224609375)
    target = uniform.to(tl.float64) * total
    passed = (tl.cumsum(sums, 0) <= target) & (at_block < blocks)
    block = tl.minimum(tl.sum(passed.to(tl.int32), 0), blocks - 1)
    before = tl.sum(tl.where(at_block < block, sums, 0.0), 0)
    at = block * SIZE + tl.arange(0, SIZE)
    temperature = tl.load(temperature_ptr + row)
    if STORED:
        weight = tl.load(weights_ptr + row * blocks * SIZE + at)
    else:
        score = _score(logits_ptr + row * stride, at, at < vocab, temperature)
        weight = _weight(score, tl.load(best_ptr + row), tl.load(min_p_ptr + row), shift, MIN_P)
        weight = tl.where(at < vocab, weight, 0.0)
    inside = tl.cumsum(weight, 0) + before <= target
    drawn = block * SIZE + tl.minimum(tl.sum(inside.to(tl.int32), 0), SIZE - 1)
    has_choice = (temperature > 0.0) & (total > 0.0)  # not so for NaN
    tl.store(out_ptr + row, tl.where(has_choice, drawn, tl.load(token_ptr + row)))


def best_tokens(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [N] the best token of each row as `torch.argmax` finds it in the scores, and float32 [N] its score."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    splits = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(vocab, BLOCK)))
    keys, index = torch.empty(2, rows, splits, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    score = torch.empty(rows, dtype=torch.float32, device=logits.device)
    per_split = triton.cdiv(vocab, splits)
    shared = (logits, temperature, keys, index)
    _best_kernel[(rows, splits)](*shared, logits.stride(0), vocab, per_split, SPLITS=splits, TILE=BLOCK, num_warps=4)
    _pick_kernel[(rows,)](*shared, token, score, logits.stride(0), vocab, SPLITS=splits, num_warps=1)
    return token, score


def sample(logits: Tensor, draw: Draw, cut: Callable[[Tensor, Tensor], None] | None = None) -> Tensor:
    """One token for each row, int32 [N]. Compute stream; the host waits for nothing.

    Args:
        logits: [N, V], rows contiguous, any floating dtype. Not changed.
        cut: takes float32 scores [N, V] and float64 weights [N, V], and sets the weights of tokens that may not be drawn to
            0, in place (top_k and top_p). None: nothing but min_p takes tokens away.
    """
    rows, vocab = logits.shape
    if not rows:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    token, best = best_tokens(logits, draw.temperature)
    if not draw.random:
        return token
    blocks = triton.cdiv(vocab, BLOCK)
    shift = 1.5 * 2.0 ** vocab.bit_length()
    scores, weights, out = best, best, torch.empty_like(token)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    if cut is not None:
        scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
        weights = torch.empty(rows, blocks * BLOCK, dtype=torch.float64, device=logits.device)
    # fmt: off
    parameters = (logits, draw.temperature, draw.min_p)
    numbers = (logits.stride(0), vocab, blocks, shift)
    min_p = draw.min_p_used and cut is None
    _weigh_kernel[(rows, blocks)](
        *parameters, best, scores, weights, sums, *numbers, MIN_P=min_p, STORE=cut is not None, SIZE=BLOCK, num_warps=4
    )
    if cut is not None:
        cut(scores, weights[:, :vocab])
        torch.sum(weights.view(rows, blocks, BLOCK), -1, out=sums)
    _draw_kernel[(rows,)](
        *parameters, draw.uniform, best, token, weights, sums, out, *numbers,
        MIN_P=min_p, STORED=cut is not None, SIZE=BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
    )
    # fmt: on
    return out
