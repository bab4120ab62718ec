"""The one place where a request changes state, and the only one that gives back what it holds.

    I1  Each request ends with exactly one terminal event, whatever path it takes.
    I2  Whoever ends a request goes through `transition`; only it releases pages, rows and labels.
    I3  A request in flight when it ends is released when its last launched step has committed.
    I11 A page or row freed while steps are launched returns when the newest of them has committed.

I3 and I11 are one rule here: what is given back while steps are launched joins a queue, marked with the newest launched
step (the fence), and returns when that step has committed; pages that are being swapped out, when they are copied, too.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cbengine.cache.manager import CacheManager, Dropped
from cbengine.cache.swap import Transfer
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.scheduling.request import LEGAL, Request
from cbengine.scheduling.rows import DEAD, LEAVING, RUNNING, RowTable


@dataclass(slots=True)
class _Returning:
    """A row, or blocks without one, on the way back."""

    fence: int
    request: Request | None = None
    transfer: Transfer | None = None
    """What still reads the row's pages."""
    dropped: Dropped = field(default_factory=list)


class Lifecycle:
    """State changes, and the queue of rows and pages on their way back."""

    on_change: Callable[[Request], None]
    """Hears of every change of state; of a terminal one exactly once. Set by the loop."""
    on_requeue: Callable[[Request], None]
    """Called when a preempted request has given everything back and can wait for its next turn. Set by the loop."""

    def __init__(self, rows: RowTable, cache: CacheManager) -> None:
        self._rows = rows
        self._cache = cache
        self._returning: list[_Returning] = []
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
        if to.ended and request.ticket is not None:
            self._drop_ticket(request)
        if to is RequestStatus.PREEMPTED:
            request.preemptions += 1
            self.preemptions += 1
        self.on_change(request)

    def _give_back(self, request: Request, row_status: int) -> None:
        row, table = request.row, self._rows
        already = table.status[row] == LEAVING  # preempted, and ends before its row came back
        table.status[row] = row_status
        if already:
            return
        transfer = None
        if row_status == LEAVING:
            request.ticket = self._cache.swap_out(row, int(table.planned[row]))
            transfer = None if request.ticket is None else request.ticket.transfer
        self._cache.retire(row)
        self._returning.append(_Returning(self.launched, request, transfer))
        self.reclaim()

    def _drop_ticket(self, request: Request) -> None:
        assert self._cache.swap is not None and request.ticket is not None
        self._cache.swap.drop(request.ticket)
        request.ticket = None

    def advance(self, rows: np.ndarray) -> None:
        """`computed` of these rows has moved on, by a commit: windows and the prefix cache follow (I12)."""
        table = self._rows
        rows = rows[table.status[rows] == RUNNING]
        self._cache.advance(rows, table.computed[rows], table.tokens)

    def reclaim(self) -> None:
        """Take back rows and pages whose fence has committed and that nothing copies."""
        if not self._returning:
            return
        ready: list[_Returning] = []
        waiting: list[_Returning] = []
        for entry in self._returning:
            through = entry.fence <= self.committed and (entry.transfer is None or entry.transfer.done())
            (ready if through else waiting).append(entry)
        self._returning = waiting
        for entry in ready:
            self._cache.release_dropped(entry.dropped)
            if entry.request is not None:
                self._release(entry.request)

    def _release(self, request: Request) -> None:
        row = request.row
        requeue = not request.status.ended
        if requeue:
            self._rows.save(request)
            if request.ticket is not None:
                request.ticket.computed = int(self._rows.computed[row])
        self._cache.release(row)
        self._rows.release(row)
        if requeue:
            self.on_requeue(request)

    def wait_for_transfers(self) -> bool:
        """With nothing in flight: wait for the copies that hold pages up. False if there are none."""
        waited = False
        for entry in self._returning:
            if entry.transfer is not None and entry.fence <= self.committed:
                entry.transfer.wait()
                waited = True
        self.reclaim()
        return waited

    def _take_dropped(self) -> None:
        dropped = self._cache.take_dropped()
        if dropped:
            self._returning.append(_Returning(self.launched, dropped=dropped))

    def step_launched(self) -> int:
        """Count a launch; returns the number of the step."""
        self.launched += 1
        self._take_dropped()
        return self.launched

    def step_committed(self, step: int) -> None:
        """Step `step`, and with it every step before, has committed."""
        assert step == self.committed + 1, "steps commit in the order of their launch"
        self.committed = step
        self._take_dropped()
        self.reclaim()
