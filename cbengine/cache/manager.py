"""The cache as the scheduler sees it: room for tokens of rows. Engine thread only; knows nothing of models or devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cbengine.cache.blocks import BlockPool
from cbengine.cache.full import FullAttentionCacheAllocator
from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry, LayerGroup
from cbengine.cache.pool import CachePool
from cbengine.cache.prefix import Chain
from cbengine.cache.sharing import Match, PageSharing
from cbengine.cache.sliding import SlidingAttentionCacheAllocator
from cbengine.cache.swap import SwapSpace, SwapTicket

_DECODES_AHEAD = 2  # tokens of a decoding row that are planned and not committed, at most

Dropped = list[tuple[int, int]]
"""(group, block): blocks that lost an owner which a launched step may still name."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Chunks (with one attention type: blocks). `used + free + cached + reserved == total`."""

    total: int
    used: int
    free: int
    reserved: int
    cached: int = 0
    """Owned by nobody; the content is kept until the memory is needed."""


class CacheManager:
    """`num_blocks` whole-model blocks for `rows` rows of up to `max_len` tokens.

    `on_assign("block", blocks)` hears of every block of the first group that gets an owner to write it ("block1" of the
    second, and so on): a checking device turns it into a host access, so that a block handed out while a launched step may
    still touch it is found (I11).

    Args:
        sharing: completed blocks are found again by their content; with full attention only, as `shares` says.
        tokens_ahead: most tokens of one row that are planned and not committed, for promises of room.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        num_blocks: int,
        rows: int,
        max_len: int,
        on_assign: Callable[[str, list[int]], None] | None = None,
        *,
        sharing: bool = False,
        tokens_ahead: int = _DECODES_AHEAD,
    ) -> None:
        self.geometry = geometry
        self.page_size = geometry.page_size
        self._pool = CachePool(geometry.chunks_for(num_blocks) + RESERVED_CHUNKS)
        self._blocks = [BlockPool(self._pool, k) for k in geometry.blocks_per_chunk]
        self._tokens_ahead = tokens_ahead
        self._on_assign = on_assign
        self.capacity_tokens = longest_alone(geometry, self._pool.capacity, max_len)
        """Longest sequence that fits when it has the cache to itself (looked for up to `max_len`)."""
        width = max(1, geometry.blocks_for(min(max_len, self.capacity_tokens)))
        self._groups = [
            _allocator(g, b, rows, width, geometry) for g, b in zip(geometry.groups, self._blocks, strict=True)
        ]
        self._sliding = [g for g in self._groups if isinstance(g, SlidingAttentionCacheAllocator)]
        self.ready = np.zeros(rows, np.int64)
        """[rows] tokens that each row has pages for, in every group."""
        self._goals = np.zeros(rows, np.int64)  # tokens that each row was promised room for
        self._sharing = PageSharing(self._groups[0], rows, self.page_size) if sharing and not self._sliding else None
        self._dropped: Dropped = []
        self._falling: Counter[tuple[int, int]] = Counter()
        self._copies: list[Dropped] = [[] for _ in self._groups]
        self.swap: SwapSpace | None = None
        """Where preempted requests may wait; set by whoever can move blocks."""

    # --- how full it is --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Chunks that rows can hold altogether."""
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        """Chunks that can be had now, those included whose content is kept until then."""
        return self._pool.num_free + self._num_cached

    @property
    def _num_cached(self) -> int:
        return 0 if self._sharing is None else self._sharing.prefix.num_cached

    @property
    def num_retired(self) -> int:
        """Blocks that will be free once the launched steps have committed."""
        return sum(blocks.num_retired for blocks in self._blocks)

    @property
    def sharing(self) -> PageSharing | None:
        """The prefix cache; None where it is off, or where layers have windows."""
        return self._sharing

    @property
    def tables(self) -> np.ndarray:
        """int32 [rows, width] block tables of the first group."""
        return self._groups[0].tables

    @property
    def group_tables(self) -> list[np.ndarray]:
        """The block tables of each group, all of the same shape: entry i is the block of page i."""
        return [group.tables for group in self._groups]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows] pages that each row reaches up to, in the first group."""
        return self._groups[0].lengths

    def blocks_for(self, tokens: int) -> int:
        return self.geometry.blocks_for(tokens)

    def held(self, row: int) -> list[int]:
        """Number of blocks that the row holds in each group."""
        return [len(group.held(row)) for group in self._groups]

    def spare_after(self, tokens: int, match: Match | None = None) -> int:
        """Chunks that would be left if one more sequence of `tokens` tokens came in; negative: there is no room.

        What rows were promised (`goal` of `admit`) counts as gone.
        """
        pages, nodes = self.geometry.blocks_for(tokens), [] if match is None else match.nodes
        spare = self.num_free - sum(not node.owned for node in nodes)
        promised = np.flatnonzero(self._goals).tolist()
        for group, blocks in zip(self._groups, self._blocks, strict=True):
            need = group.peak(pages, self._tokens_ahead if promised else _DECODES_AHEAD) - len(nodes)
            for row in promised:
                goal = group.peak(self.geometry.blocks_for(int(self._goals[row])), self._tokens_ahead)
                need += max(0, goal - len(group.held(row)))
            spare -= blocks.chunks_for(need)
        return spare

    def will_have(self, blocks: int) -> bool:
        """Whether `blocks` more blocks can be had now, or once the launched steps have committed.

        With several groups, where a chunk comes back whole or not at all, whatever is on its way back is waited for.
        """
        if len(self._groups) == 1:
            return self.num_free + self.num_retired >= blocks
        return self.num_retired > 0

    # --- rows ------------------------------------------------------------------------------------------------------

    def match(self, chain: Chain | None, tokens: np.ndarray) -> Match:
        """What is there already of a sequence that knows `tokens`, int32; its last token is left to compute."""
        if self._sharing is None or chain is None:
            return Match()
        return self._sharing.match(chain, tokens)

    def admit(
        self,
        row: int,
        tokens: int,
        match: Match | None = None,
        *,
        chain: Chain | None = None,
        goal: int = 0,
        ticket: SwapTicket | None = None,
    ) -> int:
        """A sequence of `tokens` tokens (the first new one included) comes into `row`. Returns how many are there.

        There has to be room (`spare_after`). Full attention gets its pages at once, windows as the sequence moves on.

        Args:
            match: what was found of it.
            chain: enter what it completes into the prefix cache.
            goal: the length that it is promised room for; 0 = none.
            ticket: its pages were swapped out, and are on their way back when this returns.
        """
        nodes = [] if match is None else match.nodes
        self._goals[row] = goal
        if self._sharing is not None and chain is not None:
            self._sharing.join(row, nodes)
            self._sharing.follow(row, chain, nodes, 0 if ticket is not None else tokens - 1)
            if ticket is None:
                self._sharing.prefix.queried_tokens += tokens - 1
                self._sharing.prefix.hit_tokens += len(nodes) * self.page_size
        there = len(nodes) * self.page_size
        if ticket is not None:
            there = ticket.computed
            self._restore(row, ticket, len(nodes))
        for index, group in enumerate(self._groups):
            if group not in self._sliding:
                self._grow(index, row, self.geometry.blocks_for(tokens))
        self._update_ready(row)
        return there

    def promise_room(self, row: int, goal: int) -> None:
        """The row shall have room for `goal` tokens in the end (0 = nothing is promised)."""
        self._goals[row] = goal

    def _restore(self, row: int, ticket: SwapTicket, found: int) -> None:
        """Bring the pages of `ticket` back, but for the first `found`, which are there."""
        assert self.swap is not None
        wanted: list[list[tuple[int, int]]] = []
        for index, (group, first, blocks) in enumerate(zip(self._groups, ticket.firsts, ticket.blocks, strict=True)):
            end = first + len(blocks)
            start = max(first, found, min(end, group.first_page(ticket.computed)))
            if not found:
                group.place(row, start, start)
            self._grow(index, row, end)
            wanted.append([(page - first, int(group.tables[row, page])) for page in range(start, end)])
        self.swap.load(ticket, wanted)

    def fork(self, parent: int, child: int, tokens: int) -> bool:
        """The (empty) row `child` begins with the parent's first `tokens` tokens, which have committed. All or nothing.

        Whole pages are shared; the one where the two part is copied on the device before the next step (`take_copies`).
        """
        full, rest = divmod(tokens, self.page_size)
        firsts = [group.first_page(tokens) for group in self._groups]
        if any(int(g.firsts[parent]) > first for g, first in zip(self._groups, firsts, strict=True)):
            return False  # the parent has moved on, and what the child's window needs is gone
        if rest and sum(blocks.chunks_for(1) for blocks in self._blocks) > self.num_free:
            return False
        for index, (group, first) in enumerate(zip(self._groups, firsts, strict=True)):
            first = min(first, full)
            shared = group.tables[parent, first:full].copy()
            group.place(child, first, full)
            group.tables[child, first:full] = shared
            group.blocks.share(shared)
            if rest:
                source = int(group.tables[parent, full])
                # The parent's own may be a copy that is still to be made, and would not be made if the parent left.
                source = next((origin for origin, to in self._copies[index] if to == source), source)
                (target,) = self._grow(index, child, full + 1)
                self._copies[index].append((source, target))
                group.blocks.share(np.array([source]))  # whatever becomes of the parent, until the copy is launched
                self._drop(index, [source])
        if self._sharing is not None:
            self._sharing.fork(parent, child, full)
        self._update_ready(child)
        return True

    def reserve(self, row: int, tokens: int) -> bool:
        """Make room for the first `tokens` tokens of `row`: all or nothing."""
        pages = self.geometry.blocks_for(tokens)
        chunks = sum(b.chunks_for(g.missing(row, pages)) for g, b in zip(self._groups, self._blocks, strict=True))
        if chunks > self.num_free:
            return False
        for index in range(len(self._groups)):
            self._grow(index, row, pages)
        self._update_ready(row)
        return True

    def reach(self, row: int, tokens: int) -> int:
        """Make room for up to `tokens` tokens of `row`, as many as there is room for; returns how many have it."""
        if self.ready[row] < tokens and not self.reserve(row, tokens):
            page = self.geometry.blocks_for(int(self.ready[row]))
            while self.reserve(row, (page + 1) * self.page_size):
                page += 1
        return min(tokens, int(self.ready[row]))

    def _grow(self, index: int, row: int, pages: int) -> list[int]:
        group, blocks = self._groups[index], self._blocks[index]
        lacking = blocks.chunks_for(group.missing(row, pages)) - self._pool.num_free
        if lacking > 0 and self._sharing is not None:
            blocks.give([self._sharing.prefix.evict() for _ in range(lacking)])
        taken = group.grow(row, pages)
        if taken and self._on_assign is not None:
            self._assigned(index, taken)
        return taken

    def _assigned(self, index: int, taken: Sequence[int]) -> None:
        """Tell of new owners, under the names that the same bytes have in every group."""
        assert self._on_assign is not None
        sizes = self.geometry.group_block_bytes
        for other, size in enumerate(sizes):
            spans = [range(b * sizes[index] // size, -(-(b + 1) * sizes[index] // size)) for b in taken]
            self._on_assign(block_tag(other), sorted({b for span in spans for b in span}))

    def _update_ready(self, row: int) -> None:
        self.ready[row] = min(int(group.lengths[row]) for group in self._groups) * self.page_size

    def advance(self, rows: np.ndarray, computed: np.ndarray, tokens: np.ndarray) -> None:
        """A step has committed: `computed` of the `tokens` [all rows, width] of each running row in `rows` are there.

        Windows move on and completed pages become findable (I12). Vectorised; Python only for rows that cross a page.
        """
        for group in self._sliding:
            group.advance(rows, computed)
        if self._sharing is not None:
            self._drop(0, self._sharing.advance(rows, computed, tokens))

    def swap_out(self, row: int, planned: int) -> SwapTicket | None:
        """Start to copy the row's pages to the host, if that can be and pays. To be called before `retire`.

        `planned`: tokens that will be there when the launched steps have committed.
        """
        if self.swap is None or not planned or self._awaits_copy(row):
            return None
        pages = self.geometry.blocks_for(planned)
        firsts = [int(group.firsts[row]) for group in self._groups]
        held = [g.tables[row, first:pages].tolist() for g, first in zip(self._groups, firsts, strict=True)]
        return self.swap.save(firsts, held, planned)

    def _awaits_copy(self, row: int) -> bool:
        """Whether a page of the row, a fork, is still to be copied."""
        for group, copies in zip(self._groups, self._copies, strict=True):
            if copies and not {to for _, to in copies}.isdisjoint(group.held(row).tolist()):
                return True
        return False

    def retire(self, row: int) -> None:
        """The row ended or was preempted; its pages follow with `release`, when no launched step can touch them."""
        for index, group in enumerate(self._groups):
            if self._copies[index]:
                own = set(group.held(row).tolist())
                self._copies[index] = [pair for pair in self._copies[index] if pair[1] not in own]
            group.retire(row)
        self._goals[row] = 0
        if self._sharing is not None:
            self._sharing.retire(row)

    def release(self, row: int) -> None:
        for group in self._groups:
            self._give(group.blocks, group.release(row))
        self.ready[row] = 0
        if self._sharing is not None:
            self._sharing.release(row)

    def _give(self, blocks: BlockPool, gone: list[int]) -> None:
        blocks.give(gone if self._sharing is None else self._sharing.prefix.disown(gone))

    # --- blocks without a row --------------------------------------------------------------------------------------

    def _drop(self, index: int, blocks: list[int]) -> None:
        if blocks:
            for block in blocks:  # one by one: the same block may be dropped twice
                self._blocks[index].retire(np.array([block]))
                self._falling[index, block] += 1
            self._dropped += [(index, block) for block in blocks]

    def take_dropped(self) -> Dropped:
        """Blocks that lost an owner, to be handed to `release_dropped` once the launched steps have committed."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def release_dropped(self, dropped: Dropped) -> None:
        for index, block in dropped:
            self._falling[index, block] -= 1
            self._give(self._blocks[index], self._blocks[index].release(np.array([block])))

    def take_copies(self) -> list[Dropped]:
        """For each group (from, to): blocks to copy on the compute stream before the next step."""
        copies, self._copies = self._copies, [[] for _ in self._groups]
        return copies

    def forget(self) -> None:
        """The weights have changed: nothing that was computed is found any more."""
        if self._sharing is not None:
            self._blocks[0].give(self._sharing.clear())

    # --- for people and tests --------------------------------------------------------------------------------------

    def usage(self) -> CacheUsage:
        free, cached, reserved = self._pool.num_free, self._num_cached, self._pool.reserved
        total = self._pool.num_chunks
        return CacheUsage(total, total - free - cached - reserved, free, reserved, cached)

    @property
    def nbytes(self) -> int:
        """Bytes of the block tables and of what else is kept for each row and block."""
        per_row = sum(g.tables.nbytes + g.firsts.nbytes + g.lengths.nbytes for g in self._groups)
        return per_row + self.ready.nbytes + self._goals.nbytes + sum(b.nbytes for b in self._blocks)

    def check(self) -> None:
        """Every block has as many owners as its count says, and all chunks are accounted for (C6). For tests; O(blocks)."""
        cached = set[int]() if self._sharing is None else self._sharing.prefix.unowned()
        used = 0
        for index, group in enumerate(self._groups):
            named = Counter({block: n for (g, block), n in self._falling.items() if g == index and n})
            for row in range(len(group.lengths)):
                held = group.held(row).tolist()
                assert len(held) == len(set(held)), "a row names a block twice"
                named.update(held)
                outside = np.r_[group.tables[row, : group.firsts[row]], group.tables[row, group.lengths[row] :]]
                assert not outside.any(), "an entry that the row does not hold is not the reserved block"
            group.blocks.check(dict(named), cached)
            used += len({block // group.blocks.per_chunk for block in (*named, *cached)})
        assert used + self._pool.num_free == self.capacity, "chunks are lost, or have two groups"
        if self._sharing is not None:
            self._sharing.check()


def block_tag(index: int) -> str:
    """What blocks of a group are called towards devices that check."""
    return f"block{index or ''}"


def longest_alone(geometry: CacheGeometry, chunks: int, max_len: int) -> int:
    """Tokens of the longest sequence, up to `max_len` or a page more, that fits into `chunks` chunks by itself.

    With full attention alone, what fits: there `max_len` is no bound.
    """
    groups = [_allocator(group, None, 0, 0, geometry) for group in geometry.groups]
    if len(groups) == 1 and geometry.groups[0].window is None:
        return chunks * geometry.page_size

    def fits(pages: int) -> bool:
        needs = zip(groups, geometry.blocks_per_chunk, strict=True)
        return sum(-(-group.peak(pages, _DECODES_AHEAD) // k) for group, k in needs) <= chunks

    low, high = 0, geometry.blocks_for(max_len)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * geometry.page_size


def _allocator(
    group: LayerGroup, blocks: BlockPool | None, rows: int, width: int, geometry: CacheGeometry
) -> FullAttentionCacheAllocator:
    blocks = blocks or BlockPool(CachePool(1, reserved=0), 1)
    if group.window is None:
        return FullAttentionCacheAllocator(blocks, rows, width)
    return SlidingAttentionCacheAllocator(blocks, rows, width, group.window, geometry.page_size)
