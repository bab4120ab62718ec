"""Scheduling in passes: decode, prefill, admit. A policy is the order of the passes and of the queue.

Costs O(batch) numpy plus Python for what changed: a row that needs its next page, a prompt being computed, a request that
joins. Engine thread only.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from cbengine.cache.manager import CacheManager
from cbengine.cache.prefix import Chain
from cbengine.cache.sharing import Match
from cbengine.outputs import RequestStatus
from cbengine.scheduling.base import Budgets, Chunk, Scheduler, StepPlan
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.preemption import choose_victim
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import RUNNING, RowTable
from cbengine.scheduling.waiting import WaitingQueue

_NONE = np.zeros(0, np.int64)


def _by_id(request: Request) -> int:
    return request.id


class PassScheduler(Scheduler):
    """Base of the policies. `passes()` names the order.

    Requests are served by arrival within each pass, and the head of the queue is never overtaken for ever (B6): if it does
    not fit, nobody is let in, and since everyone who runs finishes or is preempted, room for it comes. Only while it waits
    for pages that somebody is computing, which is bounded, others go ahead (see `WaitingQueue`).

    `reserve`: let a request in only if its longest possible answer fits beside what everyone else was promised; then nobody
    is ever preempted. Otherwise ("optimistic") its known tokens have to fit.
    """

    def __init__(
        self,
        rows: RowTable,
        cache: CacheManager,
        lifecycle: Lifecycle,
        budgets: Budgets,
        safety_margin: float,
        *,
        reserve: bool = False,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._lifecycle = lifecycle
        self._budgets = budgets
        self._margin = int(safety_margin * cache.capacity)
        self._reserve = reserve
        self._queue = WaitingQueue()
        self._prefilling: list[Request] = []  # by arrival
        self._decoding: list[Request] = []  # by arrival
        self._decode_rows: np.ndarray | None = _NONE  # rows of _decoding; None = to be made again
        self._decodable = _NONE
        self._left = [0, 0, 0]  # tokens, requests, pages still to be given out in the step being planned
        self._prefill_left = math.inf  # of the prompt tokens that those who decode put up with
        self._prefill_of_long = math.inf  # of those of a long prompt
        self._stalled = False
        self._alone = False  # the next one let in has the cache to itself
        self._hermit: Request | None = None  # who has it
        self._plan = StepPlan(_NONE)

    @abstractmethod
    def passes(self) -> tuple[Callable[[], None], ...]:
        """The order in which a step is filled."""

    # --- the queue -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, request: Request) -> None:
        self._queue.add(request)

    def remove(self, request: Request) -> None:
        for group in (self._prefilling, self._decoding):
            at = bisect_left(group, request.id, key=_by_id)
            if at < len(group) and group[at] is request:
                del group[at]
                self._decode_rows = None
                return
        self._queue.remove(request)

    def head(self) -> Request | None:
        """The request that is let in next."""
        return self._queue.first() or self._queue.head()

    # --- the plan --------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        self._left = [self._budgets.tokens, self._budgets.requests, self._budgets.pages_read]
        self._stalled = False
        self._plan = StepPlan(_NONE)
        if self._decode_rows is None:
            self._decode_rows = np.fromiter((r.row for r in self._decoding), np.int64, len(self._decoding))
        # Taken before any pass: a request whose last chunk is planned now decodes in the next step at the earliest.
        self._decodable = self._decode_rows
        decodes, waiting = len(self._decodable), len(self._queue)
        self._prefill_left = self._budgets.prefill_share(decodes, waiting)
        self._prefill_of_long = self._budgets.prefill_share(decodes, waiting, of_long=True)
        for fill in self.passes():
            fill()
        if not self._plan and self._lifecycle.launched == self._lifecycle.committed:
            self._unblock()
        self._queue.tick(int(min(self._left[0], max(0, self._prefill_left))))
        return self._plan

    def _unblock(self) -> None:
        """Nothing runs and nothing is in flight: nobody waits for others then, and who has no room starts again alone."""
        if self._stalled and not self._cache.num_retired:
            # Enough is free, but in pieces: chunks that hold a few blocks of another attention type each.
            victim = max((*self._prefilling[-1:], *self._decoding[-1:]), key=_by_id)
            self._alone = True
            self._preempt(victim)
            self._stalled = False
        self._queue.call_back(everyone=True)
        self._admit_pass()

    def _decode_pass(self) -> None:
        """One token for every decoding row that has a token left to make and a page to put it in."""
        rows, table = self._decodable, self._rows
        if not len(rows):
            return
        # Position p is computed to sample token p + 1, so nothing is computed past limit - 2: an end by length is known
        # ahead and never scheduled past (I4). A prefill pass before this one may have preempted somebody.
        rows = rows[(table.planned[rows] < table.limit[rows] - 1) & ~table.held[rows] & (table.status[rows] == RUNNING)]
        lockstep = table.lockstep[rows]
        if lockstep.any():  # they sit out the step for which their last token is not known yet
            rows = rows[~lockstep | (table.planned[rows] < table.known[rows])]
        rows = rows[: max(0, min(self._left[0], self._left[1]))]
        full = table.planned[rows] >= self._cache.ready[rows]
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
        self._stalled |= bool(dry)
        has_page = table.planned[rows] < self._cache.ready[rows]
        return rows[has_page & (table.status[rows] == RUNNING)]

    def _grow(self, row: int) -> bool:
        return self._cache.reserve(row, int(self._rows.planned[row]) + 1)

    def _preempt_for(self, blocks: int) -> bool:
        """Preempt one request if the pages on their way back will not do. False: nothing more to do but wait."""
        if self._cache.will_have(blocks):
            return False
        victim = choose_victim(self._prefilling, self._decoding)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def _preempt(self, victim: Request) -> None:
        """Take it out of the step being planned, and let it wait again."""
        plan, row = self._plan, victim.row
        decoding = plan.decode_rows == row
        if decoding.any():
            plan.decode_rows = plan.decode_rows[~decoding]
            self._rows.planned[row] -= 1
            self._left[0] += 1
        for chunk in plan.chunks:
            if chunk.request is victim:
                if chunk.score[0] < chunk.score[1]:
                    victim.scored = chunk.score[0]
                self._rows.planned[row] -= chunk.count
                self._left[0] += chunk.count
        plan.chunks = [chunk for chunk in plan.chunks if chunk.request is not victim]
        self.remove(victim)
        self._lifecycle.transition(victim, RequestStatus.PREEMPTED)

    def _prefill_pass(self) -> None:
        """The next chunk of every prompt that is being computed, while the token budget lasts."""
        for request in self._prefilling[:]:
            if request.status is RequestStatus.PREFILLING and not self._take_chunk(request):
                return

    def _take_chunk(self, request: Request) -> bool:
        """Plan the next piece of its prompt. False: the step is full."""
        row, table = request.row, self._rows
        pages = int(self._cache.lengths[row])
        if self._left[0] <= 0 or self._left[1] <= 0 or pages > self._left[2] or self._prefill_left <= 0:
            return False
        start = int(table.planned[row])
        end = min(int(table.known[row]), start + self._left[0], start + self._bearable(row, start))
        scores = table.prompt_logprobs[row] >= 0
        if scores:
            # Each of its tokens has logits, and those of a step are bounded by the number of requests.
            end = min(end, start + self._left[1])
        room = self._cache.reach(row, end)
        while room <= start and self._preempt_for(1):
            if request.status is not RequestStatus.PREFILLING:
                return True
            room = self._cache.reach(row, end)
        count = room - start
        if count <= 0:  # its window cannot move on; what runs will make room
            self._stalled = True
            return True
        last = room == table.known[row]
        chunk = Chunk(request, row, start, count, last)
        if scores:
            first, to = max(start, request.scored), min(room, request.prompt_len - 1)
            if first < to:
                chunk.score, request.scored = (first, to), to
                self._left[1] -= to - first
        self._plan.chunks.append(chunk)
        table.planned[row] += count
        self._left[0] -= count
        self._left[1] -= 1
        self._left[2] -= pages
        self._prefill_left -= count * self._budgets.cost(start + count // 2)
        if last:
            self.remove(request)
            self._decodes(request)
        return True

    def _bearable(self, row: int, start: int) -> int:
        """Tokens of its prompt that those who decode in this step put up with; a small rest of it is not left over."""
        if self._prefill_left == math.inf:
            return self._left[0]
        known, long = int(self._rows.known[row]), self._budgets.long_prompt
        share = min(self._prefill_left, self._prefill_of_long if long and known > long else math.inf)
        tokens, rest = max(1, int(share / self._budgets.cost(start))), known - start
        return rest if rest <= tokens + tokens // 4 else tokens

    def _decodes(self, request: Request) -> None:
        insort(self._decoding, request, key=_by_id)
        self._decode_rows = None
        self._lifecycle.transition(request, RequestStatus.DECODING)

    # --- letting in ------------------------------------------------------------------------------------------------

    def _admit_pass(self) -> None:
        """Let waiting requests in, by arrival, while there is room for all of their tokens and the first new one."""
        self._queue.call_back()
        if self._stalled:  # pages are short for those who run already
            return
        if self._hermit is not None:
            if not self._hermit.status.ended:
                return
            self._hermit = None
        while self._left[0] > 0 and self._left[1] > 0 and self._prefill_left > 0 and self._rows.num_free:
            request = self._queue.first()
            if request is None or self._hermit is not None:
                return
            if self.num_running and self.num_running >= self._budgets.requests:
                return
            match = self._find(request)
            if match is not None and not self._let_in(request, match):
                self._take_from_held()
                return

    def _take_from_held(self) -> None:
        """Somebody waits for room: a request that only waits for its reader gives its pages up, the newest first."""
        held = [request for request in self._decoding if request.held and request.row >= 0]
        if held and not self._cache.num_retired:
            self._preempt(held[-1])

    def _find(self, request: Request) -> Match | None:
        """What is there of the request's tokens. None: it was set aside, because somebody is computing more of them."""
        cache, parent = self._cache, request.parent
        patient = self._queue.has_patience(request)
        if parent is not None and patient and not request.preemptions and not self._is_past_prompt(parent):
            self._queue.set_aside(len(request.tokens), lambda: self._is_past_prompt(parent))
            return None
        if cache.sharing is None or request.params.prompt_logprobs is not None:
            return Match()
        if request.chain is None:
            request.chain = Chain(request.cache_salt)
        match = cache.match(request.chain, request.tokens)
        if match.promised and patient and request.ticket is None:
            prefix, key = cache.sharing.prefix, request.chain.keys[len(match.nodes) + match.promised - 1]
            self._queue.set_aside(match.promised * cache.page_size, lambda: not prefix.promised((key,)))
            return None
        return match

    def _let_in(self, request: Request, match: Match) -> bool:
        """Admit the first of the queue if there is room, and plan its first tokens."""
        cache, known = self._cache, len(request.tokens)
        goal = request.limit if self._reserve else 0
        spare = cache.spare_after(max(goal, known + 1), match)
        if spare < 0 or (self.num_running and spare < self._margin):
            return False
        if cache.blocks_for(known + 1) > self._left[2]:
            return False
        self._queue.pop()
        row = self._rows.assign(request)
        there = self._begin(request, row, match, goal)
        self._rows.computed[row] = self._rows.planned[row] = there
        if self._alone:
            self._alone, self._hermit = False, request
        if request.preemptions == 0:
            request.cached_tokens = min(there, request.prompt_len)
        restored = request.ticket is not None and known - there == 1
        request.ticket = None
        self._lifecycle.transition(request, RequestStatus.PREFILLING)
        if restored:  # nothing is computed again: it goes on where it was
            self._decodes(request)
            if self._grow(row):
                self._rows.planned[row] += 1
                self._plan.decode_rows = np.append(self._plan.decode_rows, row)
                self._left[0] -= 1
                self._left[1] -= 1
                self._left[2] -= int(cache.lengths[row])
            return True
        insort(self._prefilling, request, key=_by_id)
        self._take_chunk(request)
        return True

    def _begin(self, request: Request, row: int, match: Match, goal: int) -> int:
        """Give the row its pages; returns how many tokens are there."""
        cache, known, parent = self._cache, len(request.tokens), request.parent
        if parent is not None and request.ticket is None and self._ready_to_fork(request, parent):
            shared = request.prompt_len - 1
            if shared > len(match.nodes) * cache.page_size and cache.fork(parent.row, row, shared):
                cache.promise_room(row, goal)
                reserved = cache.reserve(row, known + 1)
                assert reserved, "room was there a moment ago"
                return shared
        return cache.admit(row, known + 1, match, chain=request.chain, goal=goal, ticket=request.ticket)

    def _is_past_prompt(self, parent: Request) -> bool:
        """Whether all of the parent's prompt but its last token has committed, or will not be computed soon."""
        if parent.status is RequestStatus.DECODING:
            return bool(self._rows.computed[parent.row] >= parent.prompt_len - 1)
        return parent.status not in (RequestStatus.PENDING, RequestStatus.PREFILLING)

    def _ready_to_fork(self, request: Request, parent: Request) -> bool:
        """Whether the parent's row holds the prompt's K and V (all but the last token's), committed."""
        row, shared = parent.row, request.prompt_len - 1
        if row < 0 or self._rows.status[row] != RUNNING or len(request.tokens) != request.prompt_len or not shared:
            return False
        return bool(self._rows.computed[row] >= shared)
