"""The prefix cache: what is found, who computes what, and what is evicted."""

from __future__ import annotations

import numpy as np
import pytest

from cbengine.cache.prefix import Chain, Node, PrefixCache
from cbengine.testing import SimDevice
from tests.cache.churn import MEMORY, make_driver

SYSTEM = [2 + i % 19 for i in range(40)]


def entered(cache: PrefixCache, tokens: list[int], blocks: list[int], salt: str | None = None) -> list[Node]:
    """Pages of 4 tokens, entered and left without an owner."""
    chain, array = Chain(salt), np.array(tokens, np.int32)
    chain.extend(array, len(blocks), 4)
    nodes: list[Node] = []
    for page, block in enumerate(blocks):
        node = cache.add(nodes[-1] if nodes else None, chain, array, page, block)
        assert node is not None
        nodes.append(node)
    assert cache.disown(blocks) == []
    return nodes


def test_a_chain_goes_from_its_tail_and_a_hot_prefix_stays() -> None:
    cache = PrefixCache(4)
    entered(cache, [1] * 8, [10, 11])
    old = entered(cache, [2] * 8, [20, 21])
    cache.own(old)  # it is used again, and so is now the newest
    cache.disown([20, 21])
    assert [cache.evict() for _ in range(4)] == [11, 10, 21, 20]
    cache.check()


def test_a_shared_head_outlives_its_tails() -> None:
    cache = PrefixCache(4)
    entered(cache, [1] * 4, [10])
    chain, tokens = Chain(), np.array([1] * 4 + [5] * 4, np.int32)
    head = cache.match(chain, tokens, 2)
    cache.own(head)
    assert cache.add(head[0], Chain.like(chain, 2), tokens, 1, 11) is not None
    cache.disown([10, 11])
    assert [cache.evict(), cache.evict()] == [11, 10]


def test_salts_keep_apart_what_is_otherwise_the_same() -> None:
    cache = PrefixCache(4)
    entered(cache, [1] * 8, [10, 11], "a")
    tokens = np.array([1] * 8, np.int32)
    assert [len(cache.match(Chain(salt), tokens, 2)) for salt in ("a", "b", None, "")] == [2, 0, 0, 0]


def test_a_collision_is_seen() -> None:
    def same(data: bytes) -> bytes:
        return b"x"

    cache, chain = PrefixCache(4), Chain(None, same)
    tokens = np.array([1, 2, 3, 4], np.int32)
    chain.extend(tokens, 1, 4)
    assert cache.add(None, chain, tokens, 0, 10) is not None
    other = np.array([1, 2, 3, 5], np.int32)
    assert cache.match(Chain(None, same), other, 1) == []
    assert cache.add(None, chain, other, 0, 11) is None
    assert len(cache.match(Chain(None, same), tokens, 1)) == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_crowd_with_one_prefix_computes_it_once(seed: int) -> None:
    """They arrive together: the others wait for the first's pages, and somebody without that prefix passes them."""
    driver = make_driver(SimDevice(seed, memory=MEMORY), num_blocks=60, max_batch_tokens=50)
    crowd = [driver.submit([*SYSTEM, 2 + i, 3], max_new_tokens=3, ignore_eos=True) for i in range(6)]
    stranger = driver.submit([9, 9, 9], max_new_tokens=3, ignore_eos=True)
    driver.run()
    driver.check()
    first_turns = [d.request.first_scheduled_time or 0.0 for d in (crowd[0], stranger, crowd[1])]
    assert first_turns == sorted(first_turns)
    assert driver.parts.committer.prompt_tokens == 42 + 5 * 2 + 3
    assert [d.request.cached_tokens for d in crowd] == [0] + [40] * 5


def test_whoever_waits_for_a_prefix_computes_it_if_its_owner_leaves() -> None:
    driver = make_driver(SimDevice(0, memory=MEMORY), num_blocks=60)
    first = driver.submit([*SYSTEM, 2], max_new_tokens=3)
    others = [driver.submit([*SYSTEM, 3 + i], max_new_tokens=3) for i in range(3)]
    driver.turn()
    driver.turn()
    driver.cancel(first)
    driver.run()
    driver.check()
    assert all(d.buffer.ids for d in others)
    assert driver.parts.committer.prompt_tokens < 2 * 41 + 10


def test_only_what_has_committed_is_found() -> None:
    """Two steps are in flight: the pages that they fill have no hash yet (I12)."""
    ahead = 0
    for seed in range(6):
        driver = make_driver(SimDevice(seed, memory=MEMORY), num_blocks=60)
        rows, sharing = driver.parts.rows, driver.parts.cache.sharing
        assert sharing is not None
        for i in range(4):
            driver.submit([2 + (i + j) % 19 for j in range(30)], max_new_tokens=9, ignore_eos=True)
        while driver.turn():
            for row in (row for row, request in enumerate(rows.requests) if request is not None):
                pages = len(sharing._nodes[row])
                assert 4 * pages <= rows.computed[row], f"seed {seed}: {pages} pages of row {row} can be found"
                ahead += int(rows.planned[row]) // 4 > pages
        driver.run()
        driver.check()
    assert ahead > 20  # there was something not to be found


def test_a_later_turn_finds_the_answer_of_the_one_before() -> None:
    """Generated tokens are found too, and blocks of a request that still runs."""
    driver = make_driver(SimDevice(0, memory=MEMORY), num_blocks=60)
    first = driver.submit([2, 3, 4, 5, 6], max_new_tokens=30, ignore_eos=True)
    while len(first.buffer.ids) < 20:
        driver.turn()
    second = driver.submit([2, 3, 4, 5, 6, *first.buffer.ids[:14], 7], max_new_tokens=4)
    driver.run()
    driver.check()
    assert second.request.cached_tokens == 16


def test_a_hot_system_prompt_stays_under_pressure() -> None:
    driver = make_driver(SimDevice(0, memory=MEMORY), num_blocks=20)
    asked = []
    for i in range(30):
        asked.append(driver.submit([*SYSTEM, 2 + i % 20, i % 7 + 2], max_new_tokens=6, ignore_eos=True))
        driver.submit([20 + (i + j) % 11 for j in range(20)], max_new_tokens=4, ignore_eos=True)
        driver.run()
    driver.check()
    assert [d.request.cached_tokens >= 40 for d in asked] == [False] + [True] * 29


def test_new_weights_forget_everything() -> None:
    driver = make_driver(SimDevice(0, memory=MEMORY), num_blocks=60)
    driver.submit([*SYSTEM, 2], max_new_tokens=3)
    driver.run()
    driver.parts.cache.forget()
    assert driver.parts.cache.usage().cached == 0
    again = driver.submit([*SYSTEM, 2], max_new_tokens=3)
    driver.run()
    driver.check()
    assert again.request.cached_tokens == 0
