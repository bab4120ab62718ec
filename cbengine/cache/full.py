"""Blocks for layers with full attention: a sequence of n tokens holds ceil(n / page_size) of them, and keeps them all."""

from __future__ import annotations

import numpy as np

from cbengine.cache.geometry import READ_BLOCK, CacheGeometry
from cbengine.cache.pool import CachePool


class FullAttentionCacheAllocator:
    """The block tables of all rows, over one pool. Engine thread only.

    `tables`: int32 [rows, width], entries past a row's length are the reserved read block.
    `lengths`: int64 [rows], blocks held by each row.
    """

    def __init__(self, geometry: CacheGeometry, pool: CachePool, rows: int, max_len: int) -> None:
        self._geometry = geometry
        self._pool = pool
        width = min(geometry.blocks_for(max_len), pool.capacity)
        self.tables = np.full((rows, width), READ_BLOCK, np.int32)
        self.lengths = np.zeros(rows, np.int64)
        self._used = 0
        self._retired = 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks held by rows, those on their way back included."""
        return self._used

    @property
    def num_retired(self) -> int:
        """Blocks of rows that ended or were preempted, which return when their fence has committed."""
        return self._retired

    def grow(self, row: int, blocks: int) -> list[int] | None:
        """Let `row` hold `blocks` blocks in all. Returns the new ones, or None (and changes nothing) without room."""
        held = int(self.lengths[row])
        taken = self._pool.take(max(0, blocks - held))
        if taken:
            self.tables[row, held:blocks] = taken
            self.lengths[row] = blocks
            self._used += len(taken)
        return taken

    def retire(self, row: int) -> None:
        """The row's blocks are on their way back: nothing new is written to them."""
        self._retired += int(self.lengths[row])

    def release(self, row: int) -> None:
        """Return the row's blocks to the pool. Only for rows that were retired."""
        held = int(self.lengths[row])
        # Backwards, so that the sequence's first block is the last one given and the next one taken.
        self._pool.give(self.tables[row, :held][::-1].tolist())
        self.tables[row, :held] = READ_BLOCK
        self.lengths[row] = 0
        self._used -= held
        self._retired -= held
