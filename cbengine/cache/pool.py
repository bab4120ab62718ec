"""The flat pool of chunks: who has which, and nothing about what is in them. Engine thread only."""

from __future__ import annotations

from collections.abc import Iterable

from cbengine.cache.geometry import RESERVED_CHUNKS


class CachePool:
    """`num_chunks` chunks, of which the first `reserved` are never handed out.

    Last in, first out: a chunk that was just freed is the likeliest to be in the processor's caches still.
    """

    def __init__(self, num_chunks: int, reserved: int = RESERVED_CHUNKS) -> None:
        if num_chunks <= reserved:
            raise ValueError(f"a pool needs more than its {reserved} reserved chunks, got {num_chunks}")
        self.num_chunks = num_chunks
        self.reserved = reserved
        self._free = list(range(num_chunks - 1, reserved - 1, -1))
        self._is_free = bytearray(num_chunks)
        for chunk in self._free:
            self._is_free[chunk] = 1

    @property
    def capacity(self) -> int:
        """Chunks that can be handed out at all."""
        return self.num_chunks - self.reserved

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` chunks, or None if there are not that many: all or nothing."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for chunk in taken:
            self._is_free[chunk] = 0
        return taken

    def give(self, chunks: Iterable[int]) -> None:
        """Return chunks. Returning one that is free, or reserved, is a defect of the engine and raises."""
        for chunk in chunks:
            if chunk < self.reserved or self._is_free[chunk]:
                raise AssertionError(f"chunk {chunk} was returned, but nobody has it")
            self._is_free[chunk] = 1
            self._free.append(chunk)
