"""Which pages of which rows are findable by others: the prefix cache, row by row. Engine thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cbengine.cache.full import FullAttentionCacheAllocator
from cbengine.cache.prefix import Chain, Node, PrefixCache

_NEVER = 2**62


@dataclass(slots=True)
class Match:
    """What a waiting request would find."""

    nodes: list[Node] = field(default_factory=list)
    """Pages that are there already."""
    promised: int = 0
    """Pages after those which somebody is computing."""


class PageSharing:
    """Finds pages for newcomers, and enters those that rows complete.

    A row's findable pages are its first ones, without a gap, and they are the very blocks that others find: a row that
    computed a page which somebody else had entered before adopts that one and drops its own.
    """

    def __init__(self, group: FullAttentionCacheAllocator, rows: int, page_size: int) -> None:
        self.prefix = PrefixCache(page_size)
        self._group = group
        self._page_size = page_size
        self._chains: list[Chain | None] = [None] * rows
        self._nodes: list[list[Node]] = [[] for _ in range(rows)]
        self._entered = np.full(rows, _NEVER, np.int64)  # pages of each row that are findable; _NEVER: no more will be
        self.broken_promises = 0
        """How often a row left without having computed what others may be waiting for."""

    def match(self, chain: Chain, tokens: np.ndarray) -> Match:
        """At least the last of `tokens` is left to compute, whatever is found."""
        pages = (len(tokens) - 1) // self._page_size
        nodes = self.prefix.match(chain, tokens, pages)
        return Match(nodes, self.prefix.promised(chain.keys[len(nodes) : pages]))

    def join(self, row: int, nodes: list[Node]) -> None:
        """The (empty) row begins with these pages, which get one more owner."""
        if not nodes:
            return
        blocks = np.array([node.block for node in nodes], np.int32)
        self.prefix.own(nodes)
        self._group.place(row, 0, len(nodes))
        self._group.tables[row, : len(nodes)] = blocks
        self._group.blocks.share(blocks)

    def follow(self, row: int, chain: Chain, nodes: list[Node], known: int) -> None:
        """From now on, enter the pages that the row completes after `nodes`; it is about to compute `known` tokens."""
        self._chains[row], self._nodes[row], self._entered[row] = chain, list(nodes), len(nodes)
        self.prefix.promise(row, chain.keys[len(nodes) : known // self._page_size])

    def fork(self, parent: int, child: int, pages: int) -> None:
        """The child has the parent's first `pages` pages, and the same salt."""
        chain = self._chains[parent]
        if chain is None:
            return
        own = Chain.like(chain, pages)
        nodes = self._nodes[parent][:pages]
        self._chains[child], self._nodes[child] = own, nodes
        self._entered[child] = len(nodes) if self._entered[parent] != _NEVER else _NEVER

    def advance(self, rows: np.ndarray, computed: np.ndarray, tokens: np.ndarray) -> list[int]:
        """`computed` of the `tokens` [all rows, width] of `rows` have committed. Returns blocks that were dropped."""
        pages = computed // self._page_size
        due = pages > self._entered[rows]
        dropped: list[int] = []
        if due.any():
            for row, count in zip(rows[due].tolist(), pages[due].tolist(), strict=True):
                self._enter(row, count, tokens[row], dropped)
        return dropped

    def _enter(self, row: int, pages: int, tokens: np.ndarray, dropped: list[int]) -> None:
        chain, nodes, table = self._chains[row], self._nodes[row], self._group.tables[row]
        assert chain is not None
        chain.extend(tokens, pages, self._page_size)
        for page in range(len(nodes), pages):
            own = int(table[page])
            node = self.prefix.add(nodes[-1] if nodes else None, chain, tokens, page, own)
            if node is None:
                self._entered[row] = _NEVER  # a gap would follow, so nothing more is entered
                self._withdraw(row)
                return
            self.prefix.kept(node.key)
            if node.block != own:
                self.prefix.own([node])
                self._group.blocks.share(np.array([node.block]))
                table[page] = node.block
                dropped.append(own)
            nodes.append(node)
        self._entered[row] = pages

    def retire(self, row: int) -> None:
        """The row computes nothing more."""
        self._withdraw(row)

    def _withdraw(self, row: int) -> None:
        if self.prefix.withdraw(row):
            self.broken_promises += 1

    def release(self, row: int) -> None:
        self._chains[row], self._nodes[row], self._entered[row] = None, [], _NEVER

    def clear(self) -> list[int]:
        """Forget all content. Returns the blocks that nobody owned."""
        for row, chain in enumerate(self._chains):
            if chain is not None:
                self._nodes[row], self._entered[row] = [], _NEVER
        self.broken_promises += 1
        return self.prefix.clear()

    def check(self) -> None:
        """For tests; O(pages)."""
        self.prefix.check()
        for row, nodes in enumerate(self._nodes):
            table = self._group.tables[row]
            assert [node.block for node in nodes] == table[: len(nodes)].tolist(), "a row's page is not the shared one"
            assert all(node.owned for node in nodes)
