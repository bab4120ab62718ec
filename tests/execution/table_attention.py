"""Attention over whole block tables in plain torch: slow, and made so that a graph can capture it."""

from __future__ import annotations

import torch

from cbengine.attention.base import AttentionBackend, LayerKV, write_index
from cbengine.execution.inputs import StepInputs


class TableBackend(AttentionBackend):
    """Every token attends over all that its sequence's block table names; a mask leaves its own context."""

    name = "table"
    capturable = True

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        self._index = write_index(inputs, page_size)
        tokens = torch.arange(inputs.num_tokens, device=inputs.token_ids.device)
        ends = inputs.query_starts[1:].contiguous()
        self._seqs = torch.searchsorted(ends, tokens.to(ends.dtype), right=True).clamp(max=inputs.num_seqs - 1)
        self._tables = inputs.block_tables.long()
        self._positions = inputs.positions
        self._context = inputs.block_tables.shape[1] * page_size

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
        assert softcap is None and sinks is None
        heads, groups = query.shape[1], query.shape[1] // layer.key.shape[2]
        key, value = (
            part[self._tables].flatten(1, 2)[self._seqs] for part in (layer.key, layer.value)
        )  # [T, C, Hkv, D]
        key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
        scores = torch.einsum("thd,tchd->thc", query.float(), key.float()) * scale
        at = torch.arange(self._context, device=query.device)
        visible = at <= self._positions[:, None]
        if window is not None:
            visible = visible & (at > self._positions[:, None] - window)
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        # What is behind a window may be anything, a NaN included.
        value = torch.where(visible[:, :, None, None], value.float(), 0.0)
        out = torch.einsum("thc,tchd->thd", weights, value)
        assert out.shape[1] == heads
        return out.to(query.dtype)
