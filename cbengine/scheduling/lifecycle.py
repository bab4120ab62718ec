"""The one place where a request changes state, and the only one that gives back what it holds.

    I1  Each request ends with exactly one terminal event, whatever path it takes.
    I2  Whoever ends a request goes through `transition`; only it releases pages, rows and labels.
    I3  A request in flight when it ends is released when its last launched step has committed.
    I11 A page or row freed while steps are launched returns when the newest of them has committed.

I3 and I11 are one rule here: what is given back while steps are launched joins a queue, marked with the newest launched
step (the fence), and returns when that step has committed. Engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cbengine.cache.manager import CacheManager
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.scheduling.request import LEGAL, Request
from cbengine.scheduling.rows import DEAD, LEAVING, RowTable


class Lifecycle:
    """State changes, and the queue of rows and pages on their way back."""

    on_change: Callable[[Request], None]
    """Hears of every change of state; of a terminal one exactly once. Set by the loop."""
    on_requeue: Callable[[Request], None]
    """Called when a preempted request has given everything back and can wait for its next turn. Set by the loop."""

    def __init__(self, rows: RowTable, cache: CacheManager) -> None:
        self._rows = rows
        self._cache = cache
        self._returning: deque[tuple[int, Request]] = deque()
        self.launched = 0
        """Number of steps launched so far; step k is the k-th, from 1."""
        self.committed = 0
        self.preemptions = 0

    def transition(
        self,
        request: Request,
        to: RequestStatus,
        reason: FinishReason | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Move `request` to state `to`. An illegal move is a defect of the engine and ends it."""
        if to not in LEGAL[request.status]:
            raise AssertionError(f"{request!r} cannot become {to.value}")
        request.status = to
        if to.ended:
            assert reason is not None, "an end has a reason"
            request.finish_reason, request.error = reason, error
        if request.row >= 0 and (to.ended or to is RequestStatus.PREEMPTED):
            self._give_back(request, DEAD if to.ended else LEAVING)
        if to is RequestStatus.PREEMPTED:
            request.preemptions += 1
            self.preemptions += 1
        self.on_change(request)

    def _give_back(self, request: Request, row_status: int) -> None:
        already = self._rows.status[request.row] == LEAVING  # preempted, and ends before its row came back
        self._rows.status[request.row] = row_status
        if already:
            return
        self._cache.retire(request.row)
        self._returning.append((self.launched, request))
        self.reclaim()

    def reclaim(self) -> None:
        """Take back rows and pages whose fence has committed."""
        while self._returning and self._returning[0][0] <= self.committed:
            _, request = self._returning.popleft()
            row = request.row
            requeue = not request.status.ended
            if requeue:
                self._rows.save(request)
            self._cache.release(row)
            self._rows.release(row)
            if requeue:
                self.on_requeue(request)

    def step_launched(self) -> int:
        """Count a launch; returns the number of the step."""
        self.launched += 1
        return self.launched

    def step_committed(self, step: int) -> None:
        """Step `step`, and with it every step before, has committed."""
        assert step == self.committed + 1, "steps commit in the order of their launch"
        self.committed = step
        self.reclaim()
