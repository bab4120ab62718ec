"""Gather each sequence's tokens out of the pages, then torch's scaled_dot_product_attention.

The default on a CPU. Decoding sequences of similar length are gathered and computed together; the chunks of prompts one
by one. What torch's kernel cannot do (soft cap, sinks) is computed by `attention_math` over the same gathers.

Why like this (SmolLM2 shapes, one AVX2 core): gathering rows of one token costs the same as gathering whole pages, and
reads no token too many, which with pages of 256 matters for short sequences; it is four times faster than indexing by
(block, offset). Groups whose keys and values stay in the core's cache are 1.3 to 2 times faster than one large group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from cbengine.attention.base import AttentionBackend, LayerKV, write_index
from cbengine.attention.eager import attention_math

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs

_GROUP_BYTES = 2 << 20
"""Keys and values that decoding sequences computed together gather, at most (but at least one sequence)."""
_ROWS = 256
"""Query tokens of a prompt that share one mask."""


@dataclass(slots=True)
class _Gather:
    """Cached tokens to read: int64 [batch * length] pairs of block and offset."""

    batch: int
    length: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def read(self, layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [batch, length, num_kv_heads, head_dim]."""
        shape = (self.batch, self.length, *layer.key.shape[2:])
        if layer.key_rows is None or layer.value_rows is None:
            return layer.key[self.blocks, self.offsets].view(shape), layer.value[self.blocks, self.offsets].view(shape)
        rows = self.rows.get(layer.block_rows)
        if rows is None:
            rows = self.rows[layer.block_rows] = self.blocks * layer.block_rows + self.offsets
        return layer.key_rows.index_select(0, rows).view(shape), layer.value_rows.index_select(0, rows).view(shape)


@dataclass(slots=True)
class _Decodes:
    """Decoding sequences that are computed together, one query token each."""

    tokens: torch.Tensor | slice
    """Their places in the packed row."""
    gather: _Gather
    mask: torch.Tensor | None
    """Additive [B, 1, length]; None where all are of the same length."""


@dataclass(slots=True)
class _Piece:
    """Consecutive query tokens of one prompt: `queries` in the packed row see `keys` of what was gathered."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    """Additive [n, m]; None for n == m tokens that see themselves and what is before them."""


@dataclass(slots=True)
class _Layout:
    """How the step is computed in layers of one window."""

    decodes: list[_Decodes]
    chunks: list[tuple[_Gather, list[_Piece]]]


class SdpaBackend(AttentionBackend):
    """Page gather and torch's SDPA. See the module's docstring."""

    name = "sdpa"

    def __init__(self) -> None:
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        self._inputs = inputs
        self._page_size = page_size
        self._index = write_index(inputs, page_size)
        self._write_rows: dict[int, torch.Tensor] = {}
        self._layouts: dict[tuple[int | None, bool], _Layout] = {}
        self._contexts = np.asarray(inputs.host_context_lens[: inputs.num_seqs], np.int64)
        self._starts = np.asarray(inputs.host_query_starts[: inputs.num_seqs + 1], np.int64)

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer.key_rows is None or layer.value_rows is None:
            layer.key[self._index] = key
            layer.value[self._index] = value
            return
        rows = self._write_rows.get(layer.block_rows)
        if rows is None:
            rows = self._write_rows[layer.block_rows] = self._index[0] * layer.block_rows + self._index[1]
        layer.key_rows.index_copy_(0, rows, key.flatten(1))
        layer.value_rows.index_copy_(0, rows, value.flatten(1))

    def attend(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if window is not None and window >= self._contexts.max(initial=0):
            window = None  # nobody reaches it in this step
        by_math = softcap is not None or sinks is not None
        layout = self._layouts.get((window, by_math))
        if layout is None:
            layout = self._layouts[window, by_math] = self._lay_out(layer, query, window, by_math)

        def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            if by_math:
                return attention_math(q, k, v, scale=scale, mask=mask, softcap=softcap, sinks=sinks)
            return _sdpa(q, k, v, mask, scale)

        out = query.new_zeros(query.shape)
        for group in layout.decodes:
            key, value = group.gather.read(layer)
            if isinstance(group.tokens, slice):
                out[group.tokens] = compute(query[group.tokens].unsqueeze(1), key, value, group.mask)[:, 0]
            else:
                part = query.index_select(0, group.tokens).unsqueeze(1)
                out.index_copy_(0, group.tokens, compute(part, key, value, group.mask)[:, 0])
        for gather, pieces in layout.chunks:
            key, value = gather.read(layer)
            for piece in pieces:
                mask = None if piece.mask is None else piece.mask[None]
                keys, values = key[:, piece.keys], value[:, piece.keys]
                out[piece.queries] = compute(query[None, piece.queries], keys, values, mask)[0]
        return out

    def _lay_out(self, layer: LayerKV, query: torch.Tensor, window: int | None, by_math: bool) -> _Layout:
        """Group the decoding sequences and cut the chunks, for layers with this window."""
        decoding = self._inputs.num_decodes
        lengths = self._contexts[:decoding]
        if window is not None:
            lengths = np.minimum(lengths, window)
        kv_bytes = 2 * layer.key.shape[2] * layer.key.shape[3] * layer.key.element_size()
        decodes = [
            self._decode_group(seqs, lengths[seqs], query)
            for seqs in group_by_length(lengths, _GROUP_BYTES // kv_bytes)
        ]
        chunks = []
        for seq in range(decoding, len(self._contexts)):
            if self._contexts[seq] and self._starts[seq + 1] > self._starts[seq]:
                chunks.append(self._chunk(seq, query, window, by_math))
        return _Layout(decodes, chunks)

    def _decode_group(self, seqs: np.ndarray, lengths: np.ndarray, query: torch.Tensor) -> _Decodes:
        gather = self._gather(seqs, self._contexts[seqs] - lengths, lengths)
        mask = None
        if lengths.min() != lengths.max():
            # Filled on the host: a decode group is small, and a device would only be told more.
            padded = np.arange(gather.length) >= lengths[:, None]
            mask = torch.from_numpy(np.where(padded, np.float32("-inf"), np.float32(0)))[:, None]
            mask = mask.to(query.device, query.dtype)
        if len(seqs) == seqs[-1] - seqs[0] + 1:  # they are sorted, so they are neighbours
            return _Decodes(slice(int(seqs[0]), int(seqs[-1]) + 1), gather, mask)
        return _Decodes(torch.from_numpy(seqs).to(query.device), gather, mask)

    def _chunk(self, seq: int, query: torch.Tensor, window: int | None, by_math: bool) -> tuple[_Gather, list[_Piece]]:
        """One prompt's tokens of this step: whole with torch's causal mask, or in pieces with a mask of ours."""
        first, last, context = int(self._starts[seq]), int(self._starts[seq + 1]), int(self._contexts[seq])
        position = context - (last - first)  # of the first query token
        if window is not None and window >= context:
            window = None
        low = 0 if window is None else max(0, position - window + 1)
        gather = self._gather(np.array([seq]), np.array([low]), np.array([context - low]))
        if position == 0 and window is None and not by_math:
            return gather, [_Piece(slice(first, last), slice(0, context), None)]
        pieces = []
        for begin in range(first, last, _ROWS):
            end = min(begin + _ROWS, last)
            at = position + begin - first
            oldest = 0 if window is None else max(0, at - window + 1)
            mask = self._causal_mask(end - begin, at - oldest, window, query)
            pieces.append(_Piece(slice(begin, end), slice(oldest - low, at + end - begin - low), mask))
        return gather, pieces

    def _gather(self, seqs: np.ndarray, lows: np.ndarray, lengths: np.ndarray) -> _Gather:
        """Tokens `lows` to `lows + lengths` of each sequence, padded to the longest with the first of them."""
        table = self._inputs.block_tables
        device = table.device
        length = int(lengths.max())
        steps = torch.arange(length, device=device)
        if lengths.min() != length:
            # A masked token still is multiplied by 0, so it must be finite: it is one of the sequence's own.
            steps = steps * (steps < torch.from_numpy(lengths).to(device)[:, None])
        positions = torch.from_numpy(lows).to(device)[:, None] + steps
        blocks = table[torch.from_numpy(seqs).to(device)].long().gather(1, positions // self._page_size)
        return _Gather(len(seqs), length, blocks.flatten(), (positions % self._page_size).flatten())

    def _causal_mask(self, rows: int, before: int, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Additive [rows, before + rows]: row i sees `before + i + 1` columns, or the last `window` of them.

        A cut out of one kept tensor in which row i sees column c if c <= i + reach: the pattern only moves with `before`.
        The kept tensor grows to the longest context that is prefilled in more than one chunk.
        """
        kept = self._masks.get((window, query.dtype))
        if kept is None or kept.shape[1] < before + _ROWS:
            reach = window if window is not None else max(1024, 1 << before.bit_length())
            distance = torch.arange(_ROWS)[:, None] + reach - torch.arange(reach + _ROWS)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            kept = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(query.device, query.dtype)
            self._masks[window, query.dtype] = kept
        reach = kept.shape[1] - _ROWS
        mask = kept[:rows, reach - before : reach + rows]
        # A GPU's kernel reads masks 16 bytes at a time, and asks only their strides whether it may: the cut begins anywhere.
        return mask if mask.device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)


def group_by_length(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Indices of the sequences to pad to a common length, leaving out those of length 0.

    The shortest of a group has at least three quarters of the longest's length, or is at most 64 tokens shorter; and a
    group reads at most `budget` tokens with its padding, unless it is a single sequence.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    live = int(np.searchsorted(-descending, 0))
    groups = []
    start = 0
    while start < live:
        longest = int(descending[start])
        shortest = longest - max(64, longest // 4)
        end = int(np.searchsorted(-descending[:live], -shortest, side="right"))
        end = max(start + 1, min(end, start + budget // longest))
        groups.append(np.sort(order[start:end]))
        start = end
    return groups


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`attention_math` without its extras, by torch's kernel; a mask of None means causal where n > 1.

    One query token: the heads of a group are folded into query rows. Several (batch 1): they become the batch, with keys
    and values expanded over it but not copied.
    """
    batch, n, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    if n == 1:
        out = F.scaled_dot_product_attention(
            query.reshape(batch, kv_heads, group, dim),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None],
            scale=scale,
        )
        return out.reshape(batch, 1, heads, dim)
    assert batch == 1
    out = F.scaled_dot_product_attention(
        query[0].view(n, kv_heads, group, dim).permute(2, 1, 0, 3),
        key[0].transpose(0, 1).expand(group, -1, -1, -1),
        value[0].transpose(0, 1).expand(group, -1, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 1, 0, 3).reshape(1, n, heads, dim)
