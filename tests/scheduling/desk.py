"""A scheduler with its row table and its cache, and steps that are counted instead of computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from cbengine.cache.geometry import CacheGeometry
from cbengine.cache.manager import CacheManager
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.sampling import SamplingParams
from cbengine.scheduling.base import Budgets, StepPlan
from cbengine.scheduling.fifo import FifoScheduler
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.passes import PassScheduler
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import DEAD, RowTable
from cbengine.testing import FakeModel

PAGE = 4
MAX_LEN = 256


def make_request(number: int, prompt_len: int, new: int, **params: object) -> Request:
    """A request of `prompt_len` tokens that ends by length after `new` more."""
    return Request(
        id=number,
        label=f"r{number}",
        params=SamplingParams().merged(**params).resolved({}),
        seed=0,
        reader=None,
        arrival_time=0.0,
        prompt=np.arange(1, prompt_len + 1, dtype=np.int32),
        limit=prompt_len + new,
    )


class Desk:
    """Turns a scheduler by hand. A step samples token 9 wherever it samples, so every request ends by length.

    Args:
        blocks: size of the cache, in pages of 4 tokens.
        tokens, requests, pages_read: the budgets of a step.
        depth: steps in flight.
        prefill: of the budgets, the settings that bound the prompts' part of a step.
    """

    def __init__(
        self,
        policy: type[PassScheduler] = FifoScheduler,
        *,
        blocks: int = 64,
        tokens: int = 16,
        requests: int = 4,
        pages_read: int | None = None,
        margin: float = 0.0,
        depth: int = 2,
        **prefill: float,
    ) -> None:
        geometry = CacheGeometry.of(FakeModel().spec, PAGE)
        self.budgets = Budgets(tokens, requests, pages_read or blocks, **cast("dict[str, Any]", prefill))
        self.rows = RowTable(2 * requests, MAX_LEN)
        self.cache = CacheManager(geometry, blocks, 2 * requests + 1, MAX_LEN)
        self.lifecycle = Lifecycle(self.rows, self.cache)
        self.lifecycle.on_change = self._changed
        self.scheduler = policy(self.rows, self.cache, self.lifecycle, self.budgets, margin)
        self.lifecycle.on_requeue = self.scheduler.add
        self.requests: list[Request] = []
        self.on_change: Callable[[Request], None] = lambda request: None
        """Hears of every change of state, before the scheduler does."""
        self._flight: deque[tuple[int, StepPlan]] = deque()
        self._depth = depth

    def add(self, prompt_len: int, new: int) -> Request:
        request = make_request(len(self.requests), prompt_len, new)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def end(self, request: Request) -> None:
        """Cancel it."""
        self.lifecycle.transition(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def _changed(self, request: Request) -> None:
        self.on_change(request)
        if request.status.ended:
            self.scheduler.remove(request)

    @property
    def running(self) -> list[Request]:
        """Everybody who is prefilling or decoding, by arrival."""
        active = (RequestStatus.PREFILLING, RequestStatus.DECODING)
        return [request for request in self.requests if request.status in active]

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.status.ended]

    def plan(self) -> StepPlan:
        """The next step, launched."""
        plan = self.scheduler.plan()
        if plan:
            self._flight.append((self.lifecycle.step_launched(), plan))
        return plan

    def commit(self) -> None:
        """The oldest step in flight has finished."""
        number, plan = self._flight.popleft()
        table = self.rows
        counts = np.array([1] * plan.num_decodes + [chunk.count for chunk in plan.chunks])
        table.computed[plan.rows] += counts
        last = [True] * plan.num_decodes + [chunk.last for chunk in plan.chunks]
        sampled = plan.rows[np.array(last, bool)]
        alive = sampled[table.status[sampled] != DEAD]
        table.append(alive, np.full(len(alive), 9))
        for row in alive.tolist():
            request = table.requests[row]
            assert request is not None
            if table.known[row] >= table.limit[row]:
                self.lifecycle.transition(request, RequestStatus.FINISHED, FinishReason.LENGTH)
        self.lifecycle.step_committed(number)

    def turn(self) -> StepPlan:
        """As the loop does: plan the next step, and commit the oldest when the slots are full or nothing was planned."""
        plan = self.plan()
        if self._flight and (len(self._flight) == self._depth or not plan):
            self.commit()
        return plan

    def run(self, check: Callable[[StepPlan], None] = lambda plan: None, turns: int = 2000) -> int:
        """Turn until everybody has ended and nothing is in flight; returns the number of turns."""
        for turn in range(turns):
            if not self.alive and not self._flight:
                return turn
            check(self.turn())
            self.cache.check()
        raise AssertionError(f"{self.alive} have not ended after {turns} turns")

    def check_idle(self) -> None:
        assert self.cache.num_free == self.cache.capacity
        assert self.rows.num_used == 0
        assert self.scheduler.num_running == 0 and self.scheduler.num_waiting == 0


def row_owners(desk: Desk, plan: StepPlan) -> list[int]:
    """Ids of the requests of a plan, in its order. To be asked before the next commit."""
    owners = [desk.rows.requests[row] for row in plan.rows.tolist()]
    return [request.id for request in owners if request is not None]
