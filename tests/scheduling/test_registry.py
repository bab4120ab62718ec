"""Labels and queue limits, checked at the call by any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cbengine.errors import DuplicateRequestError, EngineStoppedError, QueueFullError
from cbengine.scheduling.admission import Registry


def _enter(
    registry: Registry, number: int, tokens: int = 1, label: str = "", submit: Callable[[], None] | None = None
) -> None:
    registry.enter([number], label or f"r{number}", tokens, submit or (lambda: None))


def _counts(registry: Registry) -> tuple[int, int]:
    return registry.num_labels, registry.num_queued


def test_a_request_is_submitted_when_it_gets_in() -> None:
    registry, submitted = Registry(0, 0), list[int]()
    _enter(registry, 7, submit=lambda: submitted.append(7))
    assert submitted == [7] and _counts(registry) == (1, 1)
    registry.scheduled(7)
    assert _counts(registry) == (1, 0)  # it lives, and waits no more
    registry.ended(7)
    assert _counts(registry) == (0, 0)


def test_a_label_belongs_to_one_of_the_living() -> None:
    registry, submitted = Registry(0, 0), list[int]()
    _enter(registry, 0, label="mine")
    registry.scheduled(0)
    with pytest.raises(DuplicateRequestError, match="'mine' belongs to a request that is still alive") as raised:
        _enter(registry, 1, label="mine", submit=lambda: submitted.append(1))
    assert raised.value.request_id == "mine" and submitted == [] and _counts(registry) == (1, 0)
    registry.ended(0)
    _enter(registry, 2, label="mine", submit=lambda: submitted.append(2))
    assert submitted == [2]


def test_a_late_end_does_not_free_the_label_of_the_next_one() -> None:
    registry = Registry(0, 0)
    _enter(registry, 0, label="mine")
    registry.ended(0)
    _enter(registry, 1, label="mine")
    registry.ended(0)
    with pytest.raises(DuplicateRequestError):
        _enter(registry, 2, label="mine")


def test_the_queue_is_limited_by_requests() -> None:
    registry = Registry(2, 0)
    _enter(registry, 0)
    _enter(registry, 1)
    with pytest.raises(QueueFullError, match="2 requests are waiting and max_queue_size is 2") as raised:
        _enter(registry, 2)
    assert raised.value.request_id == "r2" and _counts(registry) == (2, 2)
    registry.scheduled(0)  # who runs does not count
    _enter(registry, 2)
    registry.ended(1)  # and neither does who ended while it waited
    _enter(registry, 3)
    assert _counts(registry) == (3, 2)


def test_the_queue_is_limited_by_tokens() -> None:
    registry = Registry(0, 10)
    _enter(registry, 0, 6)
    with pytest.raises(QueueFullError, match=r"6 prompt tokens are waiting, this request adds 5 and .* is 10"):
        _enter(registry, 1, 5)
    _enter(registry, 2, 4)
    registry.scheduled(0)
    _enter(registry, 3, 6)
    assert _counts(registry) == (3, 2)


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    registry = Registry(0, 10)
    _enter(registry, 0, 1000)
    with pytest.raises(QueueFullError):
        _enter(registry, 1, 1)
    registry.scheduled(0)
    _enter(registry, 1, 1)


def test_no_limits_by_default() -> None:
    registry = Registry(0, 0)
    for number in range(5000):
        _enter(registry, number, 10_000)
    assert _counts(registry) == (5000, 5000)


def test_an_estimate_is_put_right() -> None:
    registry = Registry(0, 10)
    _enter(registry, 0, 9)
    registry.resize(0, 2)
    _enter(registry, 1, 8)  # 2 + 8: the limit exactly
    registry.resize(1, 1)
    _enter(registry, 2, 7)
    for number in (0, 1, 2):
        registry.scheduled(number)
    registry.resize(0, 500)  # it is in the queue no more, so it does not count
    _enter(registry, 3, 5)
    _enter(registry, 4, 5)
    with pytest.raises(QueueFullError, match="10 prompt tokens are waiting"):
        _enter(registry, 5, 1)


def test_the_hint_follows_how_fast_the_queue_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    registry = Registry(1, 0)

    def hint() -> float:
        with pytest.raises(QueueFullError) as raised:
            _enter(registry, 999)
        assert f"try again in about {raised.value.retry_after:.2f} s" in str(raised.value)
        return raised.value.retry_after

    _enter(registry, 0)
    assert hint() == 1.0  # nothing is known yet
    for number in range(1, 11):
        now += 0.5
        registry.scheduled(number - 1)
        _enter(registry, number)
    assert hint() == pytest.approx(0.5, rel=0.2)
    now += 1e6
    assert hint() == 60.0
    for number in range(11, 100):
        registry.scheduled(number - 1)
        _enter(registry, number)
    assert hint() == 0.01


def test_siblings_get_in_together_or_not_at_all() -> None:
    registry, submitted = Registry(3, 100), list[int]()

    def enter(ids: list[int], label: str, tokens: int = 1) -> None:
        registry.enter(ids, label, tokens, lambda: submitted.extend(ids))

    enter([0], "alone")
    with pytest.raises(QueueFullError, match=r"1 requests are waiting, this call adds 3 and max_queue_size is 3"):
        enter([1, 2, 3], "three")
    with pytest.raises(QueueFullError, match=r"1 prompt tokens are waiting, this request adds 120 and .* is 100"):
        enter([1, 2], "two", 60)
    assert submitted == [0] and _counts(registry) == (1, 1)
    enter([1, 2], "two", 49)
    assert submitted == [0, 1, 2] and _counts(registry) == (2, 3)


def test_an_empty_queue_takes_any_number_of_siblings() -> None:
    registry = Registry(2, 10)
    registry.enter(list(range(5)), "five", 100, lambda: None)
    assert _counts(registry) == (1, 5)
    for number in range(5):
        with pytest.raises(QueueFullError):
            _enter(registry, 5)
        registry.scheduled(number)
    _enter(registry, 5)


def test_a_label_is_taken_while_any_sibling_lives() -> None:
    registry = Registry(0, 0)
    registry.enter([0, 1, 2], "a", 1, lambda: None)
    for number in (1, 0, 2):
        assert registry.is_alive("a")
        with pytest.raises(DuplicateRequestError, match="'a' belongs to"):
            _enter(registry, 3, label="a")
        registry.ended(number)
        registry.ended(number)  # an end counts once
    assert not registry.is_alive("a") and _counts(registry) == (0, 0)
    _enter(registry, 3, label="a")


def test_a_closed_registry_lets_nobody_in() -> None:
    registry, submitted = Registry(0, 0), list[int]()
    _enter(registry, 0)
    registry.close(lambda label: EngineStoppedError(f"no more: {label}", request_id=label))
    with pytest.raises(EngineStoppedError, match="no more: r1") as raised:
        _enter(registry, 1, submit=lambda: submitted.append(1))
    assert raised.value.request_id == "r1" and submitted == [] and _counts(registry) == (1, 1)
    registry.ended(0)
    assert _counts(registry) == (0, 0)


def _together(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` in `count` threads that start at the same moment."""
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_thread_gets_a_label() -> None:
    registry, got, refused = Registry(0, 0), list[int](), list[int]()

    def race(number: int) -> None:
        for turn in range(50):
            try:
                _enter(registry, 100 * turn + number, label=f"label {turn}", submit=lambda turn=turn: got.append(turn))
            except DuplicateRequestError:
                refused.append(turn)

    _together(8, race)
    assert sorted(got) == list(range(50))
    assert len(refused) == 7 * 50
    assert _counts(registry) == (50, 50)


def test_the_limit_holds_among_threads() -> None:
    registry, inside, most = Registry(3, 0), list[int](), list[int]()

    def race(number: int) -> None:
        for turn in range(100):
            key = 1000 * number + turn
            try:
                _enter(registry, key, submit=lambda key=key: inside.append(key))
            except QueueFullError:
                continue
            most.append(registry.num_queued)
            registry.scheduled(key)
            registry.ended(key)

    _together(8, race)
    assert max(most) <= 3 and len(inside) == len(most)
    assert _counts(registry) == (0, 0)


def test_whoever_got_in_before_the_close_was_submitted_before_it() -> None:
    """So that the one who closes finds everybody in the inbox."""
    for _ in range(20):
        registry, order = Registry(0, 0), list[str]()

        def work(number: int, registry: Registry = registry, order: list[str] = order) -> None:
            if number == 0:
                registry.close(EngineStoppedError)
                order.append("closed")
                return
            try:
                _enter(registry, number, submit=lambda: order.append("in"))
            except EngineStoppedError:
                pass

        _together(6, work)
        assert "in" not in order[order.index("closed") :]
