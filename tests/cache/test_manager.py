"""The cache as the scheduler sees it: after every operation each block has one owner, and none is lost (C6)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cbengine.cache.geometry import READ_BLOCK, RESERVED_CHUNKS, CacheGeometry
from cbengine.cache.manager import CacheManager
from cbengine.testing import FakeModel

PAGE, MAX_LEN = 4, 40
GEOMETRY = CacheGeometry.of(FakeModel().spec, PAGE)


def make(blocks: int = 12, rows: int = 5) -> CacheManager:
    return CacheManager(GEOMETRY, blocks, rows, MAX_LEN)


def _table(cache: CacheManager, row: int) -> list[int]:
    return cache.tables[row, : cache.lengths[row]].tolist()


def test_an_empty_cache() -> None:
    cache = make(12)
    assert (cache.capacity, cache.num_free, cache.num_retired) == (12, 12, 0)
    assert cache.capacity_tokens == 48
    usage = cache.usage()
    assert (usage.total, usage.used, usage.free, usage.reserved) == (14, 0, 12, 2)
    assert (cache.tables == READ_BLOCK).all() and not cache.lengths.any()
    cache.check()


def test_a_row_holds_the_pages_of_its_tokens() -> None:
    cache = make()
    held: list[int] = []
    for tokens in range(1, 20):
        assert cache.reserve(3, tokens)
        table = _table(cache, 3)
        assert len(table) == -(-tokens // PAGE)
        assert table[: len(held)] == held  # it grows at its end
        held = table
        cache.check()
    assert cache.reserve(3, 1) and _table(cache, 3) == held  # it never shrinks


def test_room_is_made_all_or_nothing() -> None:
    cache = make(blocks=5)
    assert cache.reserve(0, 12)
    before = _table(cache, 0)
    assert not cache.reserve(0, 24) and not cache.reserve(1, 9)
    assert _table(cache, 0) == before and _table(cache, 1) == [] and cache.num_free == 2
    cache.check()
    assert cache.reserve(1, 8) and cache.num_free == 0


def test_pages_are_free_when_they_are_released_and_not_before() -> None:
    cache = make()
    cache.reserve(0, 9)
    cache.reserve(1, 5)
    cache.retire(0)
    assert (cache.num_free, cache.num_retired) == (7, 3)
    assert len(_table(cache, 0)) == 3  # steps in flight may still name them
    cache.check()
    cache.release(0)
    assert (cache.num_free, cache.num_retired) == (10, 0)
    assert _table(cache, 0) == [] and (cache.tables[0] == READ_BLOCK).all()
    cache.check()


def test_pages_are_released_once() -> None:
    cache = make()
    cache.reserve(0, 9)
    cache.retire(0)
    cache.release(0)
    free = cache.num_free
    cache.release(0)  # it holds nothing any more
    assert cache.num_free == free
    cache.check()


def test_every_new_owner_is_heard_of() -> None:
    """What the devices that check turn into an access of the host (I11)."""
    heard: list[tuple[str, list[int]]] = []
    cache = CacheManager(GEOMETRY, 12, 5, MAX_LEN, lambda kind, blocks: heard.append((kind, sorted(blocks))))
    cache.reserve(0, 9)
    cache.reserve(0, 10)  # nothing new
    cache.reserve(0, 13)
    cache.reserve(1, 100_000 // PAGE)  # no room: nothing happens
    table = _table(cache, 0)
    assert heard == [("block", sorted(table[:3])), ("block", table[3:])]


@pytest.mark.parametrize(("blocks", "width"), [(5, 5), (12, 10), (100, 10)])
def test_tables_are_as_wide_as_a_sequence_can_get(blocks: int, width: int) -> None:
    assert make(blocks).tables.shape == (5, width)


class Machine(RuleBasedStateMachine):
    """Rows come, grow, retire and go, in any order."""

    @initialize(blocks=st.integers(1, 14))
    def start(self, blocks: int) -> None:
        self.cache = make(blocks, rows=4)
        self.pages = dict.fromkeys(range(4), 0)  # what each row has to hold
        self.retired: set[int] = set()

    @property
    def free(self) -> int:
        return self.cache.capacity - sum(self.pages.values())

    @rule(row=st.integers(0, 3), tokens=st.integers(1, MAX_LEN))
    def reserve(self, row: int, tokens: int) -> None:
        if row in self.retired:
            return
        pages = max(self.pages[row], -(-tokens // PAGE))
        fits = pages - self.pages[row] <= self.free
        before = _table(self.cache, row)
        assert self.cache.reserve(row, tokens) == fits
        assert _table(self.cache, row)[: len(before)] == before
        if fits:
            self.pages[row] = pages

    @rule(row=st.integers(0, 3))
    def retire(self, row: int) -> None:
        if row not in self.retired:
            self.cache.retire(row)
            self.retired.add(row)

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.retired)))
        self.cache.release(row)
        self.retired.discard(row)
        self.pages[row] = 0

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        cache = self.cache
        cache.check()
        tables = [_table(cache, row) for row in range(4)]
        owned = [block for table in tables for block in table]
        assert [len(table) for table in tables] == list(self.pages.values())
        assert len(owned) == len(set(owned))
        assert all(RESERVED_CHUNKS <= block < cache.capacity + RESERVED_CHUNKS for block in owned)
        assert cache.num_free == self.free
        assert cache.num_retired == sum(self.pages[row] for row in self.retired)
        usage = cache.usage()
        assert usage.used + usage.free + usage.reserved == usage.total

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for row in range(4):
            self.retire(row)
        for row in range(4):
            self.cache.release(row)
        assert self.cache.num_free == self.cache.capacity and not self.cache.lengths.any()
        self.cache.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)
