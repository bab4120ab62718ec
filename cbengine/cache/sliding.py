"""Blocks for layers with a sliding window: a sequence holds the pages of its window, however long it is."""

from __future__ import annotations

import numpy as np

from cbengine.cache.blocks import BlockPool
from cbengine.cache.full import FullAttentionCacheAllocator
from cbengine.cache.geometry import READ_BLOCK


class SlidingAttentionCacheAllocator(FullAttentionCacheAllocator):
    """Pages keep their place in the block table; those wholly behind the window are given back.

    A token sees `window` tokens, itself included. What is behind the window of the last *committed* token (I12) is read by
    no step that is in flight or still to come, so those pages go back at once, and their entries name the reserved read
    block. Attention backends read only pages inside the window. (The window of the last token and not of the next one:
    a sibling computes the last token of the prompt once more.)

    So a row holds at most ceil((window + tokens ahead) / page_size) + 1 blocks, where "ahead" is what is planned and not
    committed.
    """

    def __init__(self, blocks: BlockPool, rows: int, width: int, window: int, page_size: int) -> None:
        super().__init__(blocks, rows, width)
        self._window = window
        self._page_size = page_size

    def peak(self, pages: int, tokens_ahead: int = 0) -> int:
        return min(pages, -(-(self._window + tokens_ahead) // self._page_size) + 1)

    def first_page(self, position: int) -> int:
        return max(0, position - self._window + 1) // self._page_size

    def advance(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """`computed` tokens of each of `rows` have committed: give back what is behind their windows.

        Vectorised over the rows; Python only for those that have a page to give back.
        """
        wanted = np.maximum(0, computed - self._window) // self._page_size
        due = wanted > self.firsts[rows]
        if not due.any():
            return
        for row, first in zip(rows[due].tolist(), wanted[due].tolist(), strict=True):
            start = int(self.firsts[row])
            first = min(first, int(self.lengths[row]))
            behind = self.tables[row, start:first].copy()
            self.tables[row, start:first] = READ_BLOCK
            self.firsts[row] = first
            self.blocks.retire(behind)
            self.blocks.give(self.blocks.release(behind))
