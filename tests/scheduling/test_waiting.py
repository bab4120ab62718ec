"""The queue of those who wait: its order, the set-aside, and what a removal costs."""

from __future__ import annotations

import math
import random

from cbengine.scheduling.waiting import WaitingQueue
from tests.scheduling.desk import make_request


class _Counted(int):
    """An id that counts how often anybody compares or looks it up."""

    touched = 0

    def __lt__(self, other: int) -> bool:
        _Counted.touched += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        _Counted.touched += 1
        return int(self) == other

    def __hash__(self) -> int:
        _Counted.touched += 1
        return hash(int(self))


def test_a_crowd_that_leaves_costs_no_more_than_sorting_it() -> None:
    count = 5000
    order = list(range(count))
    random.Random(0).shuffle(order)
    requests = [make_request(_Counted(number), 1, 1) for number in range(count)]
    queue = WaitingQueue()
    for number in order:
        queue.add(requests[number])
    _Counted.touched = 0
    for number in reversed(order):
        queue.remove(requests[number])
    assert len(queue) == 0 and queue.first() is None and queue.head() is None
    assert _Counted.touched < 4 * count * math.log2(count)


def test_whoever_was_removed_is_passed_over() -> None:
    requests = [make_request(number, 1, 1) for number in range(300)]
    queue = WaitingQueue()
    for request in requests:
        queue.add(request)
    for request in requests:
        if request.id % 7:
            queue.remove(request)
    queue.remove(requests[1])  # not here any more
    assert len(queue) == 43
    assert [queue.pop().id for _ in range(43)] == list(range(0, 300, 7))
    assert queue.first() is None and len(queue) == 0


def test_whoever_comes_back_is_there_once() -> None:
    queue, first, second = WaitingQueue(), make_request(0, 1, 1), make_request(1, 1, 1)
    queue.add(second)
    for _ in range(500):
        queue.add(first)
        assert queue.first() is first and len(queue) == 2
        queue.remove(first)
        assert len(queue) == 1
    queue.add(first)
    assert [queue.pop(), queue.pop()] == [first, second]
    assert queue.first() is None


def test_what_is_left_of_the_removed_is_bounded() -> None:
    """Behind one who cannot be let in for long, any number may come and go."""
    queue = WaitingQueue()
    queue.add(make_request(0, 1, 1))
    for number in range(1, 2000):
        request = make_request(number, 1, 1)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 100 and len(queue) == 1


def test_removing_one_who_was_set_aside() -> None:
    queue, first, second = WaitingQueue(), make_request(0, 1, 1), make_request(1, 1, 1)
    queue.add(first)
    queue.add(second)
    queue.set_aside(10, lambda: False)
    assert queue.first() is second and queue.head() is first and len(queue) == 2
    queue.remove(first)
    assert queue.head() is second and len(queue) == 1
    assert not queue.call_back(everyone=True)
    queue.set_aside(10, lambda: False)
    assert queue.first() is None and queue.head() is second
    queue.tick(10)
    assert queue.call_back() and queue.pop() is second and len(queue) == 0
