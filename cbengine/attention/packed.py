"""One step as kernels over packed queries and block tables want it: lengths, tables and bounds, on the device."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from cbengine.attention.base import LayerKV, TokenWriter

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs


class PackedStep:
    """Computed once for each step and attention type, from device tensors and the sizes of the step alone.

    A graph bakes the two bounds, so neither follows from lengths: `max_query_len` of a captured step is its bucket's, and
    `max_context_len` here is what the block table has room for. A kernel told less drops queries without a word, and
    takes a window that reaches further back than the bound for no window at all.
    """

    def __init__(self, inputs: StepInputs, page_size: int) -> None:
        tables = inputs.block_tables
        self.num_seqs = inputs.num_seqs
        self.tables = tables if tables.stride(-1) == 1 else tables.contiguous()
        """int32 [S, W]."""
        self.query_starts = inputs.query_starts
        """int32 [S + 1]."""
        self.context_lens = inputs.context_lens
        """int32 [S]; 0 for padding, whose result is 0."""
        self.max_context_len = max(1, tables.shape[1]) * page_size
        one_each = inputs.num_decodes == inputs.num_seqs == inputs.num_tokens
        # Told that every sequence has at most one query, flash attention takes each to have exactly one and does not
        # look at `query_starts`. Only sequences that all decode are that.
        self.max_query_len = 1 if one_each else max(2, inputs.max_query_len)
        self._unowned: torch.Tensor | None = None
        if not one_each:
            tokens = torch.arange(inputs.num_tokens, dtype=torch.int32, device=tables.device)
            self._unowned = (tokens >= self.query_starts[self.num_seqs])[:, None, None]
        self._inputs, self._page_size = inputs, page_size

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [S + 1]: sums of `context_lens`, which are the lengths of the keys to kernels that take no lengths."""
        sums = torch.zeros_like(self.query_starts)
        torch.cumsum(self.context_lens, 0, dtype=torch.int32, out=sums[1:])
        return sums

    @cached_property
    def _writer(self) -> TokenWriter:
        # Not made where a fused kernel writes the pages.
        return TokenWriter(self._inputs, self._page_size)

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        self._writer.write(layer, key, value)

    def clean(self, out: torch.Tensor) -> torch.Tensor:
        """`out` [T, H, D] with the rows of tokens past the last sequence, which kernels leave as they find them, zeroed."""
        return out if self._unowned is None else out.masked_fill_(self._unowned, 0)


def window_of(window: int | None, longest: int) -> tuple[int, int]:
    """Our window (tokens that one sees, itself included) as flash attention's: tokens before and after one's own.

    (-1, -1) where no sequence is longer than the window, `longest` being a bound of what the step's shape allows: with
    `causal` that means the same as (-1, 0), which however keeps the kernel from computing the heads of a group together.
    """
    return (-1, -1) if window is None or window >= longest else (window - 1, 0)
