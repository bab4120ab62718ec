"""Scheduling in passes: decode, prefill, admit. A policy is the order of the passes and of the queue.

Costs O(batch) numpy plus Python for what changed: a row that needs its next page, a prompt being computed, a request that
joins. Engine thread only.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from cbengine.cache.manager import CacheManager
from cbengine.outputs import RequestStatus
from cbengine.scheduling.base import Budgets, Chunk, Scheduler, StepPlan
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.preemption import choose_victim
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import RUNNING, RowTable

_NONE = np.zeros(0, np.int64)


def _by_id(request: Request) -> int:
    return request.id


class PassScheduler(Scheduler):
    """Base of the policies. `passes()` names the order.

    Requests are served by arrival within each pass, and the head of the queue is never overtaken (B6): if it does not
    fit, nobody is let in, and since everyone who runs finishes or is preempted, room for it comes.
    """

    def __init__(
        self, rows: RowTable, cache: CacheManager, lifecycle: Lifecycle, budgets: Budgets, safety_margin: float
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._lifecycle = lifecycle
        self._budgets = budgets
        self._margin_blocks = int(safety_margin * cache.capacity)
        self._waiting: list[tuple[int, Request]] = []  # heap by arrival; may hold requests that were removed
        self._num_waiting = 0
        self._prefilling: list[Request] = []  # by arrival
        self._decoding: list[Request] = []  # by arrival
        self._decode_rows: np.ndarray | None = _NONE  # rows of _decoding; None = to be made again
        self._decodable = _NONE
        self._left = [0, 0, 0]  # tokens, requests, pages still to be given out in the step being planned
        self._stalled = False
        self._plan = StepPlan(_NONE)

    @abstractmethod
    def passes(self) -> tuple[Callable[[], None], ...]:
        """The order in which a step is filled."""

    # --- the queue -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.id, request))
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        for group in (self._prefilling, self._decoding):
            at = bisect_left(group, request.id, key=_by_id)
            if at < len(group) and group[at] is request:
                del group[at]
                self._decode_rows = None
                return
        before = len(self._waiting)
        self._waiting = [entry for entry in self._waiting if entry[1] is not request]
        if len(self._waiting) != before:
            heapq.heapify(self._waiting)
            self._num_waiting -= 1

    def head(self) -> Request | None:
        """The request that is let in next."""
        return self._waiting[0][1] if self._waiting else None

    # --- the plan --------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        self._left = [self._budgets.tokens, self._budgets.requests, self._budgets.pages_read]
        self._stalled = False
        self._plan = StepPlan(_NONE)
        if self._decode_rows is None:
            self._decode_rows = np.fromiter((r.row for r in self._decoding), np.int64, len(self._decoding))
        # Taken before any pass: a request whose last chunk is planned now decodes in the next step at the earliest.
        self._decodable = self._decode_rows
        for fill in self.passes():
            fill()
        return self._plan

    def _decode_pass(self) -> None:
        """One token for every decoding row that has a token left to make and a page to put it in."""
        rows, table = self._decodable, self._rows
        if not len(rows):
            return
        # Position p is computed to sample token p + 1, so nothing is computed past limit - 2: an end by length is known
        # ahead and never scheduled past (I4).
        rows = rows[(table.planned[rows] < table.limit[rows] - 1) & ~table.held[rows]]
        rows = rows[: max(0, min(self._left[0], self._left[1]))]
        full = table.planned[rows] >= self._cache.lengths[rows] * self._cache.page_size
        if full.any():
            rows = self._extend(rows, full)
        pages = self._cache.lengths[rows].cumsum()
        if len(pages) and pages[-1] > self._left[2]:
            rows = rows[: int(np.searchsorted(pages, self._left[2], side="right"))]
        table.planned[rows] += 1
        self._plan.decode_rows = rows
        self._left[0] -= len(rows)
        self._left[1] -= len(rows)
        self._left[2] -= int(self._cache.lengths[rows].sum())

    def _extend(self, rows: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Give each row in `rows[full]` its next page, if need be by preempting; returns the rows that can run."""
        table = self._rows
        dry = [row for row in rows[full].tolist() if not self._grow(row)]
        while dry and self._preempt_for(len(dry)):
            # A victim may be one of the dry rows, and its pages may be free at once (nothing in flight).
            dry = [row for row in dry if table.status[row] == RUNNING and not self._grow(row)]
        self._stalled = bool(dry)
        has_page = table.planned[rows] < self._cache.lengths[rows] * self._cache.page_size
        return rows[has_page & (table.status[rows] == RUNNING)]

    def _grow(self, row: int) -> bool:
        return self._cache.reserve(row, int(self._rows.planned[row]) + 1)

    def _preempt_for(self, blocks: int) -> bool:
        """Preempt one request if the pages on their way back will not do. False: nothing more to do but wait."""
        if self._cache.num_free + self._cache.num_retired >= blocks:
            return False
        victim = choose_victim(self._prefilling, self._decoding)
        if victim is None:
            return False
        self._plan.chunks = [chunk for chunk in self._plan.chunks if chunk.request is not victim]
        self.remove(victim)
        self._lifecycle.transition(victim, RequestStatus.PREEMPTED)
        return True

    def _prefill_pass(self) -> None:
        """The next chunk of every prompt that is being computed, while the token budget lasts."""
        for request in self._prefilling[:]:
            if not self._take_chunk(request):
                return

    def _take_chunk(self, request: Request) -> bool:
        row, table = request.row, self._rows
        pages = int(self._cache.lengths[row])
        if self._left[0] <= 0 or self._left[1] <= 0 or pages > self._left[2]:
            return False
        start = int(table.planned[row])
        remaining = int(table.known[row]) - start
        count = min(remaining, self._left[0])
        last = count == remaining
        self._plan.chunks.append(Chunk(request, row, start, count, last))
        table.planned[row] += count
        self._left[0] -= count
        self._left[1] -= 1
        self._left[2] -= pages
        if last:
            self.remove(request)
            insort(self._decoding, request, key=_by_id)
            self._decode_rows = None
            self._lifecycle.transition(request, RequestStatus.DECODING)
        return True

    def _admit_pass(self) -> None:
        """Let waiting requests in, by arrival, while there is room for all of their tokens and the first new one."""
        if self._stalled:  # pages are short for those who run already
            return
        cache = self._cache
        while self._waiting and self._left[0] > 0 and self._left[1] > 0 and self._rows.num_free:
            request = self._waiting[0][1]
            tokens = len(request.tokens) + 1
            blocks = cache.blocks_for(tokens)
            if self.num_running:
                spare = cache.num_free - blocks
                if spare < self._margin_blocks or self.num_running >= self._budgets.requests:
                    return
            if blocks > cache.num_free or blocks > self._left[2]:
                return
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            row = self._rows.assign(request)
            reserved = cache.reserve(row, tokens)
            assert reserved, "room was there a moment ago"
            insort(self._prefilling, request, key=_by_id)
            self._lifecycle.transition(request, RequestStatus.PREFILLING)
            self._take_chunk(request)
