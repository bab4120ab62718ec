"""Who waits to be let in: a queue by arrival, and those set aside who wait for pages that somebody else is computing.

Whoever is set aside holds no row and no page, so a crowd with one prefix costs that prefix once, and the others behind it
in the queue go ahead meanwhile. Nobody is set aside for longer than computing the pages would have taken: the queue is told
how many tokens each step had left to give (`tick`), and once they add up to what is waited for, the request goes back to
its place and computes them. Engine thread only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from cbengine.scheduling.request import Request


@dataclass(slots=True)
class _Aside:
    request: Request
    over: Callable[[], bool]
    """Whether what it waits for has come, or will never come."""
    give_up_at: int


_COMPACT = 64  # entries of the heap below which those of removed requests are left where they are


class WaitingQueue:
    """A heap by arrival, and the set-aside.

    The heap has ids. One whose request is not in `_queued` is left over from a removal and is passed over; they are
    dropped together once they are the most, so that a removal costs O(log n) on average.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._queued: dict[int, Request] = {}
        self._aside: dict[int, _Aside] = {}
        self._impatient: set[int] = set()
        self._spare_tokens = 0

    def __len__(self) -> int:
        return len(self._queued) + len(self._aside)

    def add(self, request: Request) -> None:
        self._queued[request.id] = request
        heapq.heappush(self._heap, request.id)

    def remove(self, request: Request) -> None:
        """Forget the request, if it is here."""
        self._impatient.discard(request.id)
        self._aside.pop(request.id, None)
        self._queued.pop(request.id, None)
        if len(self._heap) > _COMPACT and len(self._heap) > 2 * len(self._queued):
            self._heap = list(self._queued)
            heapq.heapify(self._heap)

    def first(self) -> Request | None:
        """The next one to let in, among those who are not set aside."""
        while self._heap and self._heap[0] not in self._queued:
            heapq.heappop(self._heap)
        return self._queued[self._heap[0]] if self._heap else None

    def head(self) -> Request | None:
        """The one that has waited longest, set aside or not."""
        everyone = [entry.request for entry in self._aside.values()]
        first = self.first()
        if first is not None:
            everyone.append(first)
        return min(everyone, key=lambda request: request.id, default=None)

    def pop(self) -> Request:
        """Take the first one out: it is let in."""
        request = self._take()
        self._impatient.discard(request.id)
        return request

    def _take(self) -> Request:
        request = self.first()
        assert request is not None, "only what `first` has shown is taken"
        heapq.heappop(self._heap)
        return self._queued.pop(request.id)

    def has_patience(self, request: Request) -> bool:
        """False once it has waited for others long enough."""
        return request.id not in self._impatient

    def set_aside(self, tokens: int, over: Callable[[], bool]) -> None:
        """The first one waits until `over()`, but not once `tokens` tokens could have been computed for it."""
        request = self._take()
        self._aside[request.id] = _Aside(request, over, self._spare_tokens + tokens)

    def tick(self, spare_tokens: int) -> None:
        """A step was planned that had room for this many tokens more."""
        self._spare_tokens += spare_tokens

    def call_back(self, *, everyone: bool = False) -> bool:
        """Put those back in their place whose wait is over. True if there were any."""
        if not self._aside:
            return False
        still: dict[int, _Aside] = {}
        before = len(self._aside)
        for entry in self._aside.values():
            if not everyone and not entry.over() and self._spare_tokens < entry.give_up_at:
                still[entry.request.id] = entry
                continue
            if not entry.over():
                self._impatient.add(entry.request.id)
            self.add(entry.request)
        self._aside = still
        return len(still) < before
