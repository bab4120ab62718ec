"""The state machine: which moves there are, and that no other one is made."""

from __future__ import annotations

import pytest

from cbengine.cache.geometry import CacheGeometry
from cbengine.cache.manager import CacheManager
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import DEAD, FREE, LEAVING, RowTable
from cbengine.testing import FakeModel
from tests.scheduling.desk import Desk, make_request

S = RequestStatus

MOVES = {
    S.PENDING: {S.PREFILLING, S.CANCELLED, S.FAILED},
    S.PREFILLING: {S.DECODING, S.PREEMPTED, S.FINISHED, S.CANCELLED, S.FAILED},
    S.DECODING: {S.PREEMPTED, S.FINISHED, S.CANCELLED, S.FAILED},
    S.PREEMPTED: {S.PREFILLING, S.FINISHED, S.CANCELLED, S.FAILED},
    S.FINISHED: set[RequestStatus](),
    S.CANCELLED: set[RequestStatus](),
    S.FAILED: set[RequestStatus](),
}
REASONS = {S.FINISHED: FinishReason.STOP, S.CANCELLED: FinishReason.CANCELLED, S.FAILED: FinishReason.ERROR}


@pytest.fixture
def lifecycle() -> Lifecycle:
    rows = RowTable(2, 16)
    lifecycle = Lifecycle(rows, CacheManager(CacheGeometry.of(FakeModel().spec, 4), 8, 3, 16))
    lifecycle.on_change = lambda request: None
    lifecycle.on_requeue = lambda request: None
    return lifecycle


@pytest.mark.parametrize("to", list(S))
@pytest.mark.parametrize("status", list(S))
def test_every_move(lifecycle: Lifecycle, status: RequestStatus, to: RequestStatus) -> None:
    heard: list[RequestStatus] = []
    lifecycle.on_change = lambda request: heard.append(request.status)
    request = make_request(0, 3, 3)
    request.status = status
    if to in MOVES[status]:
        lifecycle.transition(request, to, REASONS.get(to))
        assert request.status is to and heard == [to] and request.finish_reason is REASONS.get(to)
    else:
        with pytest.raises(AssertionError, match=f"'r0' {status.value} .* cannot become {to.value}"):
            lifecycle.transition(request, to, REASONS.get(to))
        assert request.status is status and heard == [] and request.finish_reason is None


def test_an_end_has_a_reason(lifecycle: Lifecycle) -> None:
    with pytest.raises(AssertionError, match="an end has a reason"):
        lifecycle.transition(make_request(0, 3, 3), S.CANCELLED)


def test_an_end_keeps_its_error(lifecycle: Lifecycle) -> None:
    request, error = make_request(0, 3, 3), ValueError("boom")
    lifecycle.transition(request, S.FAILED, FinishReason.ERROR, error)
    assert request.error is error


def test_what_is_given_back_with_nothing_in_flight_is_there_at_once() -> None:
    desk = Desk(depth=1)
    request = desk.add(3, 5)
    desk.turn()
    desk.end(request)
    assert request.row == -1
    desk.check_idle()


def _in_flight() -> tuple[Desk, Request]:
    """A request that decodes, with two steps in flight."""
    desk = Desk()
    request = desk.add(3, 9)
    desk.turn()
    desk.turn()
    desk.plan()
    assert desk.lifecycle.launched - desk.lifecycle.committed == 2
    return desk, request


def test_what_is_in_flight_comes_back_when_the_newest_step_has_committed() -> None:
    """I3, I11."""
    desk, request = _in_flight()
    row, held = request.row, int(desk.cache.lengths[request.row])
    desk.end(request)
    for left in (1, 0):
        assert request.row == row and desk.rows.status[row] == DEAD
        assert desk.cache.lengths[row] == held and desk.cache.num_retired == held
        desk.commit()
        assert desk.lifecycle.launched - desk.lifecycle.committed == left
    assert request.row == -1 and desk.rows.status[row] == FREE
    desk.check_idle()


def test_a_preempted_request_waits_again_with_all_that_it_has_said() -> None:
    desk, request = _in_flight()
    row, known = request.row, int(desk.rows.known[request.row])
    desk.scheduler.remove(request)
    desk.lifecycle.transition(request, S.PREEMPTED)
    assert desk.rows.status[row] == LEAVING and request.preemptions == 1 and desk.lifecycle.preemptions == 1
    assert desk.scheduler.num_waiting == 0  # not before its row has come back
    desk.commit()
    desk.commit()
    # The tokens of the two steps that were in flight count.
    assert request.saved is not None and len(request.saved) == known + 2
    assert request.row == -1 and desk.scheduler.head() is request
    desk.run()
    assert request.status is S.FINISHED
    desk.check_idle()


def test_a_preempted_request_may_end_before_its_row_has_come_back() -> None:
    desk, request = _in_flight()
    row = request.row
    desk.scheduler.remove(request)
    desk.lifecycle.transition(request, S.PREEMPTED)
    desk.end(request)
    assert desk.rows.status[row] == DEAD
    desk.commit()
    desk.commit()
    assert request.saved is None
    desk.check_idle()


def test_steps_commit_in_order(lifecycle: Lifecycle) -> None:
    lifecycle.step_launched()
    second = lifecycle.step_launched()
    with pytest.raises(AssertionError, match="order of their launch"):
        lifecycle.step_committed(second)
