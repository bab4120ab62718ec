"""A second pool in host memory, where the pages of preempted requests wait, and when that is worth it.

Moving is the business of a `Mover` (execution has one), which copies whole blocks on the transfer stream. Host blocks need
no fence of their own: every copy from or to them is queued on that one stream, so they are read and written in the order in
which they were handed out. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cbengine.cache.blocks import BlockPool
from cbengine.cache.geometry import CacheGeometry
from cbengine.cache.pool import CachePool

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""For each group of layers: blocks of the device, and the blocks of the host that belong to them."""


class Transfer(Protocol):
    """A batch of copies under way."""

    def done(self) -> bool:
        """True once it is through. Does not block."""
        ...

    def wait(self) -> None:
        """Block until it is through. Raises what it raised."""
        ...


class Mover(Protocol):
    """Queues copies of blocks, ordered against the steps (I10)."""

    def to_host(self, pairs: Pairs) -> Transfer: ...

    def to_device(self, pairs: Pairs) -> Transfer: ...


@dataclass(slots=True, eq=False)
class SwapTicket:
    """Where the pages of a preempted request are."""

    firsts: list[int]
    """For each group: the first page that was kept."""
    blocks: list[list[int]]
    """For each group: the host's block of each page from there on."""
    transfer: Transfer
    """On its way out."""
    computed: int = 0
    """Tokens whose K and V are in them; known once the steps that were in flight have committed."""
    num_bytes: int = 0


@dataclass(slots=True)
class SwapCosts:
    """Whether to swap or to compute again, by what both took lately (exponential averages)."""

    mode: str = "auto"
    """"auto", "swap" or "recompute"."""
    bytes_per_second: float | None = None
    tokens_per_second: float | None = None

    def moved(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0 and num_bytes:
            self.bytes_per_second = _average(self.bytes_per_second, num_bytes / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """`tokens` of prompts took this long."""
        if seconds > 0 and tokens:
            self.tokens_per_second = _average(self.tokens_per_second, tokens / seconds)

    def prefer_swap(self, num_bytes: int, tokens: int) -> bool:
        """Whether moving `num_bytes` out and in again is cheaper than computing `tokens` again.

        "auto" swaps while it has not measured both: that is how it gets to measure.
        """
        if self.mode != "auto":
            return self.mode == "swap"
        if self.bytes_per_second is None or self.tokens_per_second is None:
            return True
        return 2 * num_bytes / self.bytes_per_second <= tokens / self.tokens_per_second


def _average(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now


@dataclass(slots=True)
class SwapSpace:
    """The host's blocks. Chunks tile them as they tile the device's."""

    geometry: CacheGeometry
    num_chunks: int
    mover: Mover
    costs: SwapCosts
    pool: CachePool = field(init=False)
    groups: list[BlockPool] = field(init=False)
    swaps_out: int = 0
    swaps_in: int = 0

    def __post_init__(self) -> None:
        self.pool = CachePool(self.num_chunks, reserved=0)
        self.groups = [BlockPool(self.pool, k) for k in self.geometry.blocks_per_chunk]

    def save(self, firsts: list[int], held: list[list[int]], tokens: int) -> SwapTicket | None:
        """Start to move these device blocks of a row out, if there is room and it pays. `tokens`: that are in them."""
        num_bytes = sum(len(b) * size for b, size in zip(held, self.geometry.group_block_bytes, strict=True))
        needs = sum(group.chunks_for(len(b)) for group, b in zip(self.groups, held, strict=True))
        if not num_bytes or needs > self.pool.num_free or not self.costs.prefer_swap(num_bytes, tokens):
            return None
        blocks = [group.take(len(b)) for group, b in zip(self.groups, held, strict=True)]
        self.swaps_out += 1
        transfer = self.mover.to_host([(device, list(host)) for device, host in zip(held, blocks, strict=True)])
        return SwapTicket(firsts, blocks, transfer, num_bytes=num_bytes)

    def load(self, ticket: SwapTicket, wanted: list[list[tuple[int, int]]]) -> None:
        """Start to move pages back: for each group pairs of (place in the ticket, device block). Ends the ticket."""
        pairs = [
            ([device for _, device in group], [blocks[place] for place, _ in group])
            for group, blocks in zip(wanted, ticket.blocks, strict=True)
        ]
        if any(device for device, _ in pairs):
            self.mover.to_device(pairs)
        self.swaps_in += 1
        self.drop(ticket)

    def drop(self, ticket: SwapTicket) -> None:
        """The host's blocks are free again."""
        for group, blocks in zip(self.groups, ticket.blocks, strict=True):
            group.owners[blocks] = 0
            group.give(blocks)
            blocks.clear()
