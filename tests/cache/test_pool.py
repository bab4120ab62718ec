"""The flat pool: who has which chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbengine.cache.geometry import RESERVED_CHUNKS
from cbengine.cache.pool import CachePool


def _all(pool: CachePool) -> list[int]:
    taken = pool.take(pool.num_free)
    assert taken is not None
    return taken


def test_reserved_chunks_are_never_handed_out() -> None:
    pool = CachePool(10)
    assert pool.capacity == pool.num_free == 8
    assert sorted(_all(pool)) == list(range(RESERVED_CHUNKS, 10))
    assert pool.num_free == 0 and pool.take(1) is None


def test_all_or_nothing() -> None:
    pool = CachePool(7)
    assert pool.take(6) is None and pool.num_free == 5
    assert pool.take(0) == [] and pool.num_free == 5
    assert len(_all(pool)) == 5


def test_what_was_freed_last_is_taken_first() -> None:
    pool = CachePool(10)
    taken = _all(pool)
    pool.give(taken[:3])
    pool.give([taken[5]])
    assert pool.take(1) == [taken[5]]
    assert pool.take(1) == [taken[2]]


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_reserved_chunk_cannot_be_returned(chunk: int) -> None:
    with pytest.raises(AssertionError, match=f"chunk {chunk} was returned, but nobody has it"):
        CachePool(10).give([chunk])


def test_a_chunk_cannot_be_returned_twice() -> None:
    pool = CachePool(10)
    taken = pool.take(3)
    assert taken is not None
    pool.give(taken[:1])
    with pytest.raises(AssertionError, match=f"chunk {taken[0]} was returned, but nobody has it"):
        pool.give(taken[:1])
    with pytest.raises(AssertionError, match="nobody has it"):
        pool.give([taken[1], taken[1]])


def test_a_chunk_that_was_never_taken_cannot_be_returned() -> None:
    with pytest.raises(AssertionError, match="chunk 5 was returned, but nobody has it"):
        CachePool(10).give([5])


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_pool_needs_more_than_its_reserved_chunks(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"more than its 2 reserved chunks, got {chunks}"):
        CachePool(chunks)


@given(
    size=st.integers(3, 20),
    steps=st.lists(st.one_of(st.integers(0, 8), st.lists(st.integers(0, 30), max_size=4)), max_size=30),
)
def test_no_chunk_has_two_owners(size: int, steps: list[int | list[int]]) -> None:
    """Against a set: an integer takes that many, a list returns chunks by their place among those that are out."""
    pool, out = CachePool(size), list[int]()
    for step in steps:
        if isinstance(step, int):
            taken = pool.take(step)
            assert (taken is None) == (step > size - RESERVED_CHUNKS - len(out))
            out += taken or []
        else:
            back = {out[i % len(out)] for i in step} if out else set[int]()
            pool.give(back)
            out = [chunk for chunk in out if chunk not in back]
        assert len(out) == len(set(out)) and all(RESERVED_CHUNKS <= chunk < size for chunk in out)
        assert pool.num_free + len(out) == pool.capacity
