"""Deadlines of requests, kept by the engine thread so that they hold while an event loop is busy elsewhere."""

from __future__ import annotations

import heapq
import time

from cbengine.errors import RequestTimeoutError
from cbengine.scheduling.request import Request

_LONGEST = 3600.0  # a lock cannot be waited for without bound, and nobody minds being woken once an hour
_COMPACT = 1024  # entries below which those of ended requests are left where they are


class Deadlines:
    """The `timeout` (whole request) and `queue_timeout` (until first scheduled) of the living. Engine thread only.

    Entries of requests that have ended, or left the queue in time, are skipped when they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool]] = []  # time, request id, is a queue timeout

    def add(self, request: Request, living: dict[int, Request]) -> None:
        """Watch a request from its arrival."""
        if len(self._heap) > _COMPACT and len(self._heap) > 4 * len(living):
            self._heap = [entry for entry in self._heap if entry[1] in living]
            heapq.heapify(self._heap)
        if request.timeout is not None:
            heapq.heappush(self._heap, (request.arrival_time + request.timeout, request.id, False))
        if request.queue_timeout is not None:
            heapq.heappush(self._heap, (request.arrival_time + request.queue_timeout, request.id, True))

    def wait(self) -> float | None:
        """Seconds until it is time to look again, 0 if a deadline has passed; None without any."""
        return min(max(0.0, self._heap[0][0] - time.monotonic()), _LONGEST) if self._heap else None

    def expired(self, living: dict[int, Request]) -> list[Request]:
        """The requests whose deadline has passed."""
        if not self._heap:
            return []
        now = time.monotonic()
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id, queued = heapq.heappop(self._heap)
            request = living.get(request_id)
            if (
                request is not None
                and request not in late
                and not (queued and request.first_scheduled_time is not None)
            ):
                late.append(request)
        return late


def timeout_error(request: Request) -> RequestTimeoutError:
    """What the reader of a late request gets."""
    waited = time.monotonic() - request.arrival_time
    if request.first_scheduled_time is None:
        what = f"waited {waited:.2f} s without being scheduled"
    else:
        what = f"was not finished after {waited:.2f} s"
    allowed = ", ".join(
        f"{name}={value:g}"
        for name, value in (("timeout", request.timeout), ("queue_timeout", request.queue_timeout))
        if value is not None
    )
    return RequestTimeoutError(
        f"request {request.label!r} {what} ({allowed}); the tokens made so far are on the stream",
        request_id=request.label,
    )
