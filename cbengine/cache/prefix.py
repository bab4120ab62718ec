"""Pages that can be used again: completed blocks, found by the content of everything up to their end.

A page's key is a hash of its tokens chained to the key of the page before it, down to a salt, so equal keys mean equal
prefixes. What is found is compared token by token and page by page before it is used: a collision costs a page, never a
wrong answer. (The chain is that of vLLM and transformers; comparing is ours.)

Only blocks whose tokens have committed are entered (I12). A block that nobody owns any more stays, as *cached*, until its
memory is needed; then the least recently used one without a successor goes first, one at a time. Engine thread only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

Digest = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    """The key of a page: 16 bytes."""
    return blake2b(data, digest_size=16).digest()


class Chain:
    """The keys of one sequence's complete pages, made once and extended as the sequence grows."""

    __slots__ = ("_digest", "_root", "keys", "salt")

    def __init__(self, salt: str | None = None, digest: Digest = digest) -> None:
        self.salt = salt
        self._digest = digest
        self._root = digest(b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass"))
        self.keys: list[bytes] = []

    @classmethod
    def like(cls, other: Chain, pages: int) -> Chain:
        """One that shares the other's salt and its first `pages` pages."""
        chain = cls(other.salt, other._digest)
        chain.keys = other.keys[:pages]
        return chain

    def extend(self, tokens: np.ndarray, pages: int, page_size: int) -> None:
        """Have the keys of the first `pages` pages of `tokens`, int32 [at least pages * page_size]."""
        keys = self.keys
        for i in range(len(keys), pages):
            parent = keys[-1] if keys else self._root
            keys.append(self._digest(parent + tokens[i * page_size : (i + 1) * page_size].tobytes()))


@dataclass(slots=True, eq=False)
class Node:
    """A complete page that can be found."""

    key: bytes
    parent: Node | None
    salt: str | None
    tokens: bytes
    block: int
    children: int = 0
    owned: bool = True
    used: int = 0
    """When it was last owned, by the cache's own clock."""

    def holds(self, parent: Node | None, salt: str | None, tokens: bytes) -> bool:
        """Whether it is what its key says: the same tokens after the same prefix."""
        return self.parent is parent and self.tokens == tokens and (parent is not None or self.salt == salt)


class PrefixCache:
    """The findable pages, and which of them nobody owns."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._nodes: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (used, tie, node); an entry may be out of date
        self._clock = 0
        self._ties = 0
        self._promised: dict[bytes, int] = {}  # key of a page that is being computed -> row
        self._promises: dict[int, list[bytes]] = {}
        self.num_cached = 0
        """Blocks that nobody owns and whose content is kept."""
        self.queried_tokens = 0
        self.hit_tokens = 0
        """Tokens that were looked for and found at admission, in all."""

    # --- finding ---------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, tokens: np.ndarray, pages: int) -> list[Node]:
        """The longest known prefix of `tokens`, in at most `pages` pages."""
        chain.extend(tokens, pages, self._page_size)
        found: list[Node] = []
        parent = None
        for i in range(pages):
            node = self._nodes.get(chain.keys[i])
            if node is None or not node.holds(parent, chain.salt, self._page(tokens, i)):
                break
            found.append(node)
            parent = node
        return found

    def _page(self, tokens: np.ndarray, page: int) -> bytes:
        return tokens[page * self._page_size : (page + 1) * self._page_size].tobytes()

    def add(self, parent: Node | None, chain: Chain, tokens: np.ndarray, page: int, block: int) -> Node | None:
        """Page number `page` of `tokens` is complete and committed, in `block`.

        Returns its node, which names another block if somebody else's was there first; None where the key stands for
        something else (a collision): then the page stays private.
        """
        key, content = chain.keys[page], self._page(tokens, page)
        node = self._nodes.get(key)
        if node is not None:
            return node if node.holds(parent, chain.salt, content) else None
        node = Node(key, parent, chain.salt, content, block)
        if parent is not None:
            parent.children += 1
        self._nodes[key] = node
        self._by_block[block] = node
        return node

    # --- owners ----------------------------------------------------------------------------------------------------

    def own(self, nodes: Sequence[Node]) -> None:
        """These have an owner (one more, or again)."""
        for node in nodes:
            if not node.owned:
                node.owned = True
                self.num_cached -= 1

    def disown(self, blocks: Sequence[int]) -> list[int]:
        """Nobody owns these blocks any more: keep those that can be found, return the others."""
        self._clock += 1
        others: list[int] = []
        for block in blocks:
            node = self._by_block.get(block)
            if node is None:
                others.append(block)
                continue
            node.owned, node.used = False, self._clock
            self.num_cached += 1
            self._offer(node)
        return others

    def _offer(self, node: Node) -> None:
        if node.children or node.owned:
            return
        if len(self._leaves) > 2 * self.num_cached + 64:
            self._leaves = [entry for entry in self._leaves if _valid(entry)]
            heapq.heapify(self._leaves)
        self._ties += 1
        heapq.heappush(self._leaves, (node.used, self._ties, node))

    def evict(self) -> int:
        """Forget the least recently used block without a successor; there must be a cached one. Returns the block."""
        while True:
            entry = heapq.heappop(self._leaves)
            if _valid(entry):
                node = entry[2]
                self._forget(node)
                self.num_cached -= 1
                node.used = -1
                return node.block

    def _forget(self, node: Node) -> None:
        del self._nodes[node.key], self._by_block[node.block]
        if node.parent is not None:
            node.parent.children -= 1
            self._offer(node.parent)

    def clear(self) -> list[int]:
        """Forget everything (the weights have changed). Returns the blocks that nobody owns."""
        free = [node.block for node in self._nodes.values() if not node.owned]
        self._nodes.clear()
        self._by_block.clear()
        self._leaves.clear()
        self._promised.clear()
        self._promises.clear()
        self.num_cached = 0
        return free

    def unowned(self) -> set[int]:
        """The cached blocks. O(pages)."""
        return {block for block, node in self._by_block.items() if not node.owned}

    # --- promises --------------------------------------------------------------------------------------------------

    def promise(self, row: int, keys: Sequence[bytes]) -> None:
        """`row` is about to compute the pages with these keys, unless somebody else promised to."""
        new = [key for key in dict.fromkeys(keys) if key not in self._promised and key not in self._nodes]
        self._promised.update(dict.fromkeys(new, row))
        if new:
            self._promises[row] = new

    def promised(self, keys: Sequence[bytes]) -> int:
        """How many of these pages, from the first on, somebody is computing."""
        count = 0
        for key in keys:
            if key not in self._promised:
                break
            count += 1
        return count

    def kept(self, key: bytes) -> None:
        """A page was computed, by whomever."""
        self._promised.pop(key, None)

    def withdraw(self, row: int) -> bool:
        """The row computes nothing more. True if it leaves a promise unkept."""
        left = [key for key in self._promises.pop(row, ()) if self._promised.get(key) == row]
        for key in left:
            del self._promised[key]
        return bool(left)

    def check(self) -> None:
        """For tests; O(pages)."""
        children: dict[int, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a page outlived its prefix"
                assert node.parent.owned or not node.owned, "a page has an owner and its prefix has none"
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        for node in self._nodes.values():
            assert node.children == children.get(id(node), 0) and self._by_block[node.block] is node
        assert self.num_cached == sum(not node.owned for node in self._nodes.values())
        assert len(self._by_block) == len(self._nodes)


def _valid(entry: tuple[int, int, Node]) -> bool:
    used, _, node = entry
    return not node.owned and not node.children and node.used == used
