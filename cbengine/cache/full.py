"""Blocks for layers with full attention: a sequence of n tokens holds ceil(n / page_size) of them, and keeps them all."""

from __future__ import annotations

import numpy as np

from cbengine.cache.blocks import BlockPool
from cbengine.cache.geometry import READ_BLOCK


class FullAttentionCacheAllocator:
    """The block tables of all rows, over one pool of blocks. Engine thread only.

    `tables`: int32 [rows, width], entry i is the block of page i; what a row does not hold is the reserved read block.
    `firsts`, `lengths`: int64 [rows]; a row holds its pages `firsts` to `lengths - 1`.
    """

    def __init__(self, blocks: BlockPool, rows: int, width: int) -> None:
        self.blocks = blocks
        self.tables = np.full((rows, width), READ_BLOCK, np.int32)
        self.firsts = np.zeros(rows, np.int64)
        self.lengths = np.zeros(rows, np.int64)

    def peak(self, pages: int, tokens_ahead: int = 0) -> int:
        """Most blocks that a sequence of `pages` pages holds at once."""
        return pages

    def first_page(self, position: int) -> int:
        """The first page that a query at `position` reads."""
        return 0

    def missing(self, row: int, pages: int) -> int:
        """Blocks that the row lacks for its first `pages` pages."""
        return max(0, pages - int(self.lengths[row]))

    def grow(self, row: int, pages: int) -> list[int]:
        """Let `row` reach up to page `pages`. Returns the new blocks. There must be room."""
        length = int(self.lengths[row])
        if pages <= length:
            return []
        taken = self.blocks.take(pages - length)
        self.tables[row, length:pages] = taken
        self.lengths[row] = pages
        return taken

    def place(self, row: int, first: int, length: int) -> None:
        """An empty row starts with page `first`, of which it holds `length - first` that others hold too, filled in
        by the caller."""
        assert not self.lengths[row], "the row is not empty"
        self.firsts[row], self.lengths[row] = first, length

    def held(self, row: int) -> np.ndarray:
        """The row's blocks, int32, by page; a view."""
        return self.tables[row, self.firsts[row] : self.lengths[row]]

    def retire(self, row: int) -> None:
        """The row's blocks are on their way back: nothing new is written to them."""
        self.blocks.retire(self.held(row))

    def release(self, row: int) -> list[int]:
        """The row holds nothing any more. Returns the blocks that nobody owns now, the sequence's first one last."""
        # Backwards, so that the sequence's first block is the last one given and the next one taken.
        gone = self.blocks.release(self.held(row)[::-1].copy())
        self.tables[row, : self.lengths[row]] = READ_BLOCK
        self.firsts[row] = self.lengths[row] = 0
        return gone
