"""The inputs of one step, as the CPU kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cbengine.kernels import library as lib
from cbengine.kernels.team import pointer

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs


class StepBatch:
    """One structure, filled anew for every step. Keeps the step's tensors alive until the next one.

    Args:
        structure: where to put it; default: a new one.
    """

    def __init__(self, structure: lib.Batch | None = None) -> None:
        self.structure = lib.Batch() if structure is None else structure
        self.pointer = pointer(self.structure)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._order = torch.empty(2, 0, dtype=torch.int32)
        self._kept: tuple[torch.Tensor, ...] = ()

    @property
    def order(self) -> torch.Tensor:
        """Int32 [seqs], once the batch has been placed: see `Batch` in cpu/rows.h."""
        return self._order[0, : self.structure.seqs]

    @property
    def alike(self) -> torch.Tensor:
        """Int32 [seqs], likewise."""
        return self._order[1, : self.structure.seqs]

    def fill(self, inputs: StepInputs, page_size: int) -> None:
        """Take over one step's tensors, which lie in host memory. Compute thread."""
        if self._slots.numel() < inputs.num_tokens:
            self._slots = torch.empty(2 * inputs.num_tokens, dtype=torch.int64)
        if self._order.shape[1] < inputs.num_seqs:
            self._order = torch.empty(2, 2 * inputs.num_seqs, dtype=torch.int32)
        tables = inputs.block_tables
        if tables.stride(1) != 1:
            tables = tables.contiguous()
        flat = (inputs.token_ids, inputs.positions, inputs.query_starts, inputs.context_lens, inputs.sample_index)
        flat = tuple(t if t.is_contiguous() else t.contiguous() for t in flat)
        assert all(t.dtype == torch.int32 for t in (*flat[:4], tables)), [t.dtype for t in (*flat, tables)]
        self._kept = (*flat, tables)
        to = self.structure
        to.tokens, to.seqs, to.samples = inputs.num_tokens, inputs.num_seqs, len(inputs.sample_index)
        to.page_size, to.table_stride, to.table_width = page_size, tables.stride(0), tables.shape[1]
        to.token_ids, to.positions, to.query_starts, to.context_lens, to.sample_index = (t.data_ptr() for t in flat)
        to.tables = tables.data_ptr()
        to.slots = self._slots.data_ptr()
        to.order, to.alike = (part.data_ptr() for part in self._order)
