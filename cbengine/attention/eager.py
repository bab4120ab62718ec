"""The plain reference: explicit scores, mask and softmax in float32. Slow, and able to do everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cbengine.attention.base import AttentionBackend, LayerKV, write_index

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs

_ROWS = 256
"""Query tokens of one block: bounds the scores of a long prompt to num_heads * _ROWS * context floats."""


def attention_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its definition, in float32. Returns [B, n, num_heads, head_dim of value] in the query's dtype.

    `query` [B, n, num_heads, D], `key` and `value` [B, m, num_kv_heads, D]; `mask` is additive, [B or 1, n or 1, m];
    `softcap` and `sinks` as in `AttentionBackend.attend`.
    """
    batch, n, heads, dim = query.shape
    m, kv_heads = key.shape[1], key.shape[2]
    group = heads // kv_heads
    folded = query.view(batch, n, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * n, dim)
    scores = torch.matmul(folded.float(), key.permute(0, 2, 3, 1).float()) * scale
    scores = scores.view(batch, kv_heads, group, n, m)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask.float()[:, None, None]
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, group, 1, 1).expand(batch, kv_heads, group, n, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :m].reshape(batch, kv_heads, group * n, m)
    out = torch.matmul(weights, value.permute(0, 2, 1, 3).float())
    return out.view(batch, kv_heads, group, n, -1).permute(0, 3, 1, 2, 4).reshape(batch, n, heads, -1).to(query.dtype)


class EagerBackend(AttentionBackend):
    """One sequence after the other, exactly its own tokens, no kernel. What the other backends are tested against."""

    name = "eager"

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        self._inputs = inputs
        self._page_size = page_size
        self._index = write_index(inputs, page_size)

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        layer.key[self._index] = key
        layer.value[self._index] = value

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
        inputs = self._inputs
        out = query.new_zeros(query.shape)
        starts = inputs.host_query_starts
        for seq in range(inputs.num_seqs):
            first, last = int(starts[seq]), int(starts[seq + 1])
            context = int(inputs.host_context_lens[seq])
            if first == last or context == 0:
                continue
            # Pages behind the window of the first query are not the sequence's any more.
            low = 0 if window is None else max(0, context - (last - first) - window + 1)
            key, value = self._read(layer, seq, low, context)
            at = torch.arange(low, context, device=query.device)
            for begin in range(first, last, _ROWS):
                end = min(begin + _ROWS, last)
                rows = at[context - low - (last - begin) : context - low - (last - end), None]
                visible = at <= rows
                if window is not None:
                    visible &= at > rows - window
                mask = torch.zeros(visible.shape, device=query.device).masked_fill_(~visible, float("-inf"))
                out[begin:end] = attention_math(
                    query[None, begin:end], key, value, scale=scale, mask=mask[None], softcap=softcap, sinks=sinks
                )[0]
        return out

    def _read(self, layer: LayerKV, seq: int, low: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence from token `low` on, [1, context - low, num_kv_heads, head_dim]."""
        first, pages = low // self._page_size, -(-context // self._page_size)
        blocks = self._inputs.block_tables[seq, first:pages].long()
        wanted = slice(low - first * self._page_size, context - first * self._page_size)
        key = layer.key[blocks].flatten(0, 1)[None, wanted]
        value = layer.value[blocks].flatten(0, 1)[None, wanted]
        return key, value
