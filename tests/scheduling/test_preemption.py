"""Who gives way when pages run out, and that everybody finishes all the same."""

from __future__ import annotations

import pytest

from cbengine.outputs import RequestStatus
from cbengine.scheduling.base import StepPlan
from cbengine.scheduling.fifo import FifoScheduler
from cbengine.scheduling.passes import PassScheduler
from cbengine.scheduling.preemption import choose_victim
from cbengine.scheduling.prefill_first import PrefillFirstScheduler
from cbengine.scheduling.request import Request
from tests.scheduling.desk import Desk, make_request

POLICIES = pytest.mark.parametrize("policy", [FifoScheduler, PrefillFirstScheduler])


def _requests(*ids: int) -> list[Request]:
    return [make_request(number, 3, 3) for number in ids]


def test_the_newest_gives_way() -> None:
    prefilling, decoding = _requests(2, 5), _requests(0, 1, 4)
    assert choose_victim(prefilling, decoding) is prefilling[-1]
    assert choose_victim(prefilling[:1], decoding) is decoding[-1]
    assert choose_victim([], decoding) is decoding[-1]
    assert choose_victim(prefilling, []) is prefilling[-1]


def test_the_last_one_never_gives_way() -> None:
    assert choose_victim([], []) is None
    assert choose_victim(_requests(3), []) is None
    assert choose_victim([], _requests(3)) is None


def _watch_victims(desk: Desk) -> list[int]:
    """Ids of everybody who is preempted, in order; none of them may be the oldest of those who run."""
    victims: list[int] = []

    def heard(request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            assert desk.running and request.id > desk.running[0].id
            victims.append(request.id)

    desk.on_change = heard
    return victims


def _until_decoding(desk: Desk) -> None:
    while any(request.status is not RequestStatus.DECODING for request in desk.alive):
        desk.turn()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_give_way_than_are_needed(depth: int) -> None:
    """Three requests with four pages each fill the cache, and all need a fifth at once: one victim frees four."""
    desk = Desk(blocks=12, tokens=64, depth=depth)
    victims = _watch_victims(desk)
    for _ in range(3):
        desk.add(15, 20)
    _until_decoding(desk)
    for _ in range(4):
        desk.turn()
    assert victims == [2]
    assert [request.id for request in desk.running] == [0, 1]
    desk.run()
    desk.check_idle()


def test_as_many_give_way_as_are_needed() -> None:
    """Five requests with two pages each fill the cache; the fifth's and the fourth's serve the other three."""
    desk = Desk(blocks=10, tokens=64, requests=5, depth=1)
    victims = _watch_victims(desk)
    for _ in range(5):
        desk.add(7, 9)
    _until_decoding(desk)
    for _ in range(2):
        desk.turn()
    assert victims == [4, 3]
    desk.run()
    desk.check_idle()


def test_pages_on_their_way_back_are_waited_for() -> None:
    """Nobody gives way if those that have just ended free enough."""
    desk = Desk(blocks=8, tokens=64)
    victims = _watch_victims(desk)
    first, _, third = desk.add(15, 4), desk.add(7, 9), desk.add(7, 9)
    _until_decoding(desk)
    while desk.rows.planned[first.row] < 16:
        desk.turn()
    desk.end(third)
    assert desk.cache.num_free == 0 and desk.cache.num_retired > 0
    desk.run()
    assert victims == []


@POLICIES
@pytest.mark.parametrize("depth", [1, 2])
def test_everybody_finishes_with_five_times_as_much_as_fits(policy: type[PassScheduler], depth: int) -> None:
    desk = Desk(policy, blocks=20, tokens=16, requests=12, depth=depth)
    victims = _watch_victims(desk)
    computed = needed = 0
    for i in range(24):
        prompt_len, new = 1 + i * 7 % 12, 6 + i * 11 % 40
        desk.add(prompt_len, new)
        needed += prompt_len + new - 1
    pages = sum(desk.cache.blocks_for(request.limit) for request in desk.requests)
    assert pages >= 5 * desk.cache.capacity

    def count(plan: StepPlan) -> None:
        nonlocal computed
        computed += plan.num_tokens

    desk.run(count)
    assert {request.status for request in desk.requests} == {RequestStatus.FINISHED}
    assert sum(request.preemptions for request in desk.requests) == desk.lifecycle.preemptions == len(victims)
    print(f"{len(victims)} preemptions, {computed / needed:.2f} tokens computed for each one needed")  # pytest -rP
    # Bounded: nobody is preempted again and again, and what is computed twice is less than what has to be computed once.
    assert 0 < len(victims) <= 2 * len(desk.requests)
    assert max(request.preemptions for request in desk.requests) <= 5
    assert computed < 2 * needed
    desk.check_idle()
