"""The simulated device: legal orders only, and every one of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cbengine.devices import MemoryInfo
from cbengine.testing import RaceError, SimDeadlock, SimDevice


def _lazy() -> SimDevice:
    return SimDevice(0, eagerness=0.0)


def _nothing() -> None:
    pass


# Order


def test_nothing_runs_until_it_must() -> None:
    device = _lazy()
    compute, transfer, swap = device.stream("compute"), device.stream("transfer"), device.stream("swap")
    ready, done = device.event("ready"), device.event("done")
    device.launch(transfer, _nothing, name="inputs")
    device.record(ready, transfer)
    device.launch(transfer, _nothing, name="the next inputs")
    device.launch(swap, _nothing, name="unrelated")
    device.wait(compute, ready)
    device.launch(compute, _nothing, name="forward")
    device.record(done, compute)
    device.launch(compute, _nothing, name="the next forward")
    assert device.trace == []
    done.synchronize()
    assert device.trace == [("transfer", "inputs"), ("compute", "forward")]
    device.synchronize()
    assert len(device.trace) == 5


def test_an_eager_device_runs_at_host_calls() -> None:
    device = SimDevice(0, eagerness=0.9)
    for _ in range(100):
        device.launch(device.stream("compute"), _nothing)
    assert len(device.trace) > 80


def _two_streams(seed: int) -> list[tuple[str, str]]:
    device = SimDevice(seed)
    for i in range(3):
        for name in ("a", "b"):
            device.launch(device.stream(name), _nothing, name=str(i))
    device.synchronize()
    return device.trace


def test_a_seed_is_an_order_and_all_orders_come() -> None:
    orders = Counter(tuple(name for name, _ in _two_streams(seed)) for seed in range(2000))
    assert len(orders) == 20  # 6! / (3! 3!)
    assert [_two_streams(seed) for seed in range(20)] == [_two_streams(seed) for seed in range(20)]


def test_a_query_that_is_repeated_becomes_true() -> None:
    device = _lazy()
    done = device.event()
    device.launch(device.stream("compute"), _nothing)
    device.record(done, device.stream("compute"))
    assert not done.query()
    assert any(done.query() for _ in range(1000))


def test_a_wait_is_for_the_record_that_was_newest_at_the_call() -> None:
    device = _lazy()
    first, second = device.stream("first"), device.stream("second")
    event, done = device.event(), device.event()
    device.launch(first, _nothing, name="old")
    device.record(event, first)
    device.wait(second, event)
    device.launch(first, _nothing, name="new")
    device.record(event, first)
    device.record(done, second)
    done.synchronize()
    assert device.trace == [("first", "old")]


def test_a_copy_may_be_torn_by_a_host_that_does_not_wait() -> None:
    def seen(seed: int, torn_copies: bool) -> list[int]:
        device = SimDevice(seed, check_races=False, torn_copies=torn_copies)
        source, target = device.host_buffer((1, 4), torch.int64), device.device_buffer((1, 4), torch.int64)
        device.copy(device.stream("transfer"), target, source)
        device.host_access(writes=(source,))
        source.fill_(1)
        device.synchronize()
        assert device.trace == [("transfer", "copy")]
        return target[0].tolist()

    assert {tuple(seen(seed, False)) for seed in range(300)} == {(0, 0, 0, 0), (1, 1, 1, 1)}
    assert {tuple(seen(seed, True)) for seed in range(300)} == {(0, 0, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1)}


def test_only_what_ran_is_in_the_trace() -> None:
    def broken() -> None:
        raise ValueError

    device = _lazy()
    stream, done = device.stream("compute"), device.event()
    for fn in (_nothing, broken, _nothing):
        device.launch(stream, fn)
    device.record(done, stream)
    with pytest.raises(ValueError):
        done.synchronize()
    assert device.trace == [("compute", "_nothing")]


# Deadlocks


def test_an_operation_that_waits_for_itself_is_a_deadlock() -> None:
    device = SimDevice(4)
    stream, done = device.stream("compute"), device.event("done")
    device.record(done, stream)
    device.launch(stream, lambda: done.synchronize())
    device.record(done, stream)
    with pytest.raises(SimDeadlock, match="compute"):
        done.synchronize()
    assert isinstance(device.fault, SimDeadlock)
    with pytest.raises(SimDeadlock):
        device.launch(stream, _nothing)
    device.close()


def test_two_operations_that_wait_for_each_other_are_a_deadlock() -> None:
    for seed in range(20):
        device = SimDevice(seed, eagerness=0.0)
        a, b = device.stream("a"), device.stream("b")
        after_a, after_b = device.event(), device.event()
        device.launch(a, lambda after_b=after_b: after_b.synchronize())
        device.record(after_a, a)
        device.launch(b, lambda after_a=after_a: after_a.synchronize())
        device.record(after_b, b)
        with pytest.raises(SimDeadlock):
            device.synchronize()


def test_an_operation_may_wait_for_another_stream_that_can_go_on() -> None:
    device = _lazy()
    a, b = device.stream("a"), device.stream("b")
    after_a, after_b = device.event(), device.event()
    device.launch(b, _nothing, name="first")
    device.record(after_b, b)
    device.launch(a, after_b.synchronize, name="second")
    device.record(after_a, a)
    after_a.synchronize()
    assert device.trace == [("b", "first"), ("a", "second")]


def test_what_an_operation_waits_for_is_not_ordered_before_the_host() -> None:
    device = SimDevice(0, eagerness=0.9)
    a, b, after_b = device.stream("a"), device.stream("b"), device.event()
    device.launch(b, _nothing, reads=("x",))
    device.record(after_b, b)
    device.launch(a, after_b.synchronize)
    while len(device.trace) < 2:
        device.host_access()
    with pytest.raises(RaceError):
        device.host_access(writes=("x",))


def test_an_operation_that_waits_for_the_whole_device_is_a_deadlock() -> None:
    device = _lazy()
    device.launch(device.stream("compute"), device.synchronize)
    with pytest.raises(SimDeadlock):
        device.synchronize()


def test_an_operation_may_not_queue_anything() -> None:
    device = _lazy()
    stream, done = device.stream("compute"), device.event()
    device.launch(stream, lambda: device.launch(stream, _nothing))
    device.record(done, stream)
    with pytest.raises(RuntimeError, match="called the device"):
        done.synchronize()


# Options


def test_calls_can_be_dropped() -> None:
    asked: list[tuple[str, str]] = []

    def drop(kind: str, name: str) -> bool:
        asked.append((kind, name))
        return name == "dropped"

    device = SimDevice(0, eagerness=0.0, drop=drop)
    a, b = device.stream("a"), device.stream("b")
    kept, dropped = device.event("kept"), device.event("dropped")
    device.launch(a, _nothing, name="first")
    device.record(dropped, a)
    dropped.synchronize()
    device.record(kept, a)
    device.wait(b, kept)
    device.launch(b, _nothing, name="second")
    assert device.trace == []
    kept.synchronize()
    assert device.trace == [("a", "first")]
    assert asked == [
        ("record", "dropped"),
        ("synchronize", "dropped"),
        ("record", "kept"),
        ("wait", "kept"),
        ("synchronize", "kept"),
    ]


def test_memory_can_be_given() -> None:
    memory = MemoryInfo(total=2**30, free=2**20)
    assert SimDevice(0, memory=memory).memory_info() == memory


def test_eagerness_is_a_chance() -> None:
    for eagerness in (-0.1, 1.0):
        with pytest.raises(ValueError, match="eagerness"):
            SimDevice(0, eagerness=eagerness)
