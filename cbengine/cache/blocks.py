"""Blocks of one attention type, carved out of chunks, and how many owners each has. Engine thread only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbengine.cache.pool import CachePool


class BlockPool:
    """Takes a chunk when its open chunks have no free block left, and gives a chunk back when all its blocks are free.

    Blocks come from the fullest open chunk, so that the emptier ones get a chance to become empty.

    A block has as many owners as rows name it. Owners that have left, but may still be named by a launched step, count as
    leaving until their fence has committed.
    """

    def __init__(self, pool: CachePool, per_chunk: int) -> None:
        self.per_chunk = per_chunk
        self._pool = pool
        self.owners = np.zeros(pool.num_chunks * per_chunk, np.int32)
        self._leaving = np.zeros(pool.num_chunks * per_chunk, np.int32)
        self._free: dict[int, list[int]] = {}  # open chunk -> its free blocks
        # Open chunks by the number of their free blocks, 1 to per_chunk - 1, each in the order of their opening.
        self._by_room: list[dict[int, None]] = [{} for _ in range(per_chunk)]
        self.num_open = 0
        """Free blocks in open chunks."""
        self.num_taken = 0
        """Blocks that were taken and not given back: those with an owner, and those that a cache keeps."""
        self.num_retired = 0
        """Blocks all of whose owners are leaving."""

    def chunks_for(self, count: int) -> int:
        """Chunks to take from the pool for `count` more blocks."""
        return -(-max(0, count - self.num_open) // self.per_chunk)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one owner each. There must be room."""
        if self.per_chunk == 1:
            taken = self._pool.take(count)
            assert taken is not None, "room was there a moment ago"
        else:
            taken = [self._take_one() for _ in range(count)]
        self.owners[taken] = 1
        self.num_taken += count
        return taken

    def _take_one(self) -> int:
        for room in range(1, self.per_chunk):
            if self._by_room[room]:
                chunk = next(iter(self._by_room[room]))
                break
        else:
            chunks = self._pool.take(1)
            assert chunks is not None, "room was there a moment ago"
            chunk = chunks[0]
            self._free[chunk] = [chunk * self.per_chunk + i for i in reversed(range(self.per_chunk))]
            self.num_open += self.per_chunk
        block = self._free[chunk].pop()
        self.num_open -= 1
        self._file(chunk, len(self._free[chunk]) + 1)
        return block

    def _file(self, chunk: int, room_before: int) -> None:
        """The free blocks of an open chunk have changed: put it where it belongs."""
        room = len(self._free[chunk])
        if room_before < self.per_chunk:
            self._by_room[room_before].pop(chunk, None)
        if 0 < room < self.per_chunk:
            self._by_room[room][chunk] = None
        elif room == self.per_chunk:
            del self._free[chunk]
            self.num_open -= room
            self._pool.give((chunk,))

    def give(self, blocks: Sequence[int]) -> None:
        """Blocks without owners go back."""
        assert not self.owners[list(blocks)].any(), "a block with an owner was given back"
        self.num_taken -= len(blocks)
        if self.per_chunk == 1:
            self._pool.give(blocks)
            return
        for block in blocks:
            chunk = block // self.per_chunk
            free = self._free.setdefault(chunk, [])
            assert block not in free, f"block {block} was returned, but nobody has it"
            free.append(block)
            self.num_open += 1
            self._file(chunk, len(free) - 1)

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each of these (distinct) blocks."""
        was_retired = (self._leaving[blocks] == self.owners[blocks]) & (self.owners[blocks] > 0)
        self.num_retired -= int(was_retired.sum())
        self.owners[blocks] += 1

    def retire(self, blocks: np.ndarray) -> None:
        """One owner of each of these (distinct) blocks leaves."""
        self._leaving[blocks] += 1
        self.num_retired += int((self._leaving[blocks] == self.owners[blocks]).sum())

    def release(self, blocks: np.ndarray) -> list[int]:
        """One leaving owner of each is gone. Returns the blocks that nobody owns any more; they are not given back yet."""
        assert (self._leaving[blocks] > 0).all(), "a block was released that nobody leaves"
        was_retired = self._leaving[blocks] == self.owners[blocks]
        self.owners[blocks] -= 1
        self._leaving[blocks] -= 1
        gone = self.owners[blocks] == 0
        # What was wholly retired and has owners left stays so.
        self.num_retired -= int((was_retired & gone).sum())
        return blocks[gone].tolist()

    @property
    def nbytes(self) -> int:
        return self.owners.nbytes + self._leaving.nbytes

    def check(self, named: dict[int, int], cached: set[int]) -> None:
        """`named`: how often rows (and what is on its way back) name each block. For tests; O(blocks)."""
        owned = {int(b): int(self.owners[b]) for b in np.flatnonzero(self.owners)}
        assert owned == named, f"owners {owned} differ from the block tables {named}"
        assert not cached & set(owned), "a cached block has an owner"
        free = {block for blocks in self._free.values() for block in blocks}
        assert not free & (set(owned) | cached), "a free block is in use"
        assert self.num_taken == len(owned) + len(cached) and self.num_open == len(free)
        retired = (self._leaving == self.owners) & (self.owners > 0)
        assert self.num_retired == int(retired.sum()) and (self._leaving <= self.owners).all()
        chunks = {block // self.per_chunk for block in (*owned, *cached)}
        assert all(0 < len(blocks) < self.per_chunk for blocks in self._free.values() if blocks)
        assert min(chunks, default=self._pool.reserved) >= self._pool.reserved, "a reserved block has an owner"
