"""The cache as the scheduler sees it: room for tokens of rows. Engine thread only; knows nothing of models or devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cbengine.cache.full import FullAttentionCacheAllocator
from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry
from cbengine.cache.pool import CachePool


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Pages, counted in blocks (a block = a page for each layer). `used + free + reserved == total`."""

    total: int
    used: int
    free: int
    reserved: int


class CacheManager:
    """`num_blocks` blocks for `rows` rows of up to `max_len` tokens.

    `on_assign("block", blocks)` hears of every block that gets an owner: a checking device turns it into a host access,
    so that a block handed out while a launched step may still touch it is found (I11).
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        num_blocks: int,
        rows: int,
        max_len: int,
        on_assign: Callable[[str, list[int]], None] | None = None,
    ) -> None:
        self.geometry = geometry
        self.page_size = geometry.page_size
        self._pool = CachePool(num_blocks + RESERVED_CHUNKS)
        self._full = FullAttentionCacheAllocator(geometry, self._pool, rows, max_len)
        self._on_assign = on_assign

    @property
    def capacity(self) -> int:
        """Blocks that rows can hold altogether."""
        return self._pool.capacity

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits when it has the cache to itself."""
        return self._pool.capacity * self.page_size

    @property
    def num_free(self) -> int:
        return self._full.num_free

    @property
    def num_retired(self) -> int:
        """Blocks that will be free once the launched steps have committed."""
        return self._full.num_retired

    @property
    def tables(self) -> np.ndarray:
        """int32 [rows, width] block tables."""
        return self._full.tables

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows] blocks held by each row."""
        return self._full.lengths

    def blocks_for(self, tokens: int) -> int:
        return self.geometry.blocks_for(tokens)

    def reserve(self, row: int, tokens: int) -> bool:
        """Make room for the first `tokens` tokens of `row`: all or nothing."""
        taken = self._full.grow(row, self.geometry.blocks_for(tokens))
        if taken is None:
            return False
        if taken and self._on_assign is not None:
            self._on_assign("block", taken)
        return True

    def retire(self, row: int) -> None:
        """The row ended or was preempted; its pages follow with `release`, when no launched step can touch them."""
        self._full.retire(row)

    def release(self, row: int) -> None:
        self._full.release(row)

    def usage(self) -> CacheUsage:
        return CacheUsage(self._pool.num_chunks, self._full.num_used, self._full.num_free, RESERVED_CHUNKS)

    def check(self) -> None:
        """Every block has one owner, and all blocks are accounted for (C6). For tests; O(blocks)."""
        owned = [b for row, n in enumerate(self.lengths.tolist()) for b in self.tables[row, :n].tolist()]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert min(owned, default=RESERVED_CHUNKS) >= RESERVED_CHUNKS, "a reserved block has an owner"
        assert len(owned) == self._full.num_used and len(owned) + self.num_free == self.capacity
        for row, n in enumerate(self.lengths.tolist()):
            assert (self.tables[row, n:] == 0).all(), "an entry past a row's length is not the reserved block"
