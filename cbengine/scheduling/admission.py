"""Who is alive and who waits: labels and queue limits, checked at the call. Any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from cbengine.errors import DuplicateRequestError, QueueFullError


class Registry:
    """Labels of the living and the size of the queue. A short lock; nothing slow happens under it.

    Entered by the calling thread, left by the engine thread. A label is free again before its request's terminal event
    is delivered, so a retry under the same label is never refused.
    """

    def __init__(self, max_queue_size: int, max_queued_tokens: int) -> None:
        self._lock = threading.Lock()
        self._labels: dict[str, int] = {}  # -> how many of its requests live
        self._label_of: dict[int, str] = {}  # id -> label
        self._max_requests = max_queue_size
        self._max_tokens = max_queued_tokens
        self._queued: dict[int, int] = {}  # id -> tokens it counts for
        self._tokens = 0
        self._closed: Callable[[str], Exception] | None = None
        self._left_at: deque[float] = deque(maxlen=32)  # when requests left the queue, for the retry hint

    @property
    def num_labels(self) -> int:
        return len(self._labels)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def is_alive(self, label: str) -> bool:
        """Whether a living request has this label."""
        return label in self._labels

    def enter(self, request_ids: Sequence[int], label: str, tokens: int, submit: Callable[[], None]) -> None:
        """Register requests that wait, all or none, and `submit()` them: several answers to one prompt share a label.

        Each of them counts for `tokens`.

        Raises `DuplicateRequestError`, `QueueFullError` or what `close` was given, and then has changed nothing.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed(label)
            if label in self._labels:
                raise DuplicateRequestError(
                    f"request_id {label!r} belongs to a request that is still alive; use another one, or wait for its end",
                    request_id=label,
                )
            self._check_room(len(request_ids), tokens * len(request_ids), label)
            self._labels[label] = len(request_ids)
            for request_id in request_ids:
                self._label_of[request_id] = label
                self._queued[request_id] = tokens
                self._tokens += tokens
            # Under the lock, so that whoever closes the registry finds in the inbox every request that got in before.
            submit()

    def _check_room(self, requests: int, tokens: int, label: str) -> None:
        """Raise `QueueFullError` unless there is room for so many more. Under the lock."""
        if not self._queued:
            return  # it takes anything: a limit under what one call needs must not refuse it for ever
        if self._max_requests and len(self._queued) + requests > self._max_requests:
            more = f", this call adds {requests}" if requests > 1 else ""
            raise self._full(
                f"{len(self._queued)} requests are waiting{more} and max_queue_size is {self._max_requests}", label
            )
        if self._max_tokens and self._tokens + tokens > self._max_tokens:
            raise self._full(
                f"{self._tokens} prompt tokens are waiting, this request adds {tokens} and max_queued_tokens is "
                f"{self._max_tokens}",
                label,
            )

    def close(self, error: Callable[[str], Exception]) -> None:
        """From now on nobody gets in: `enter` raises `error(label)`."""
        with self._lock:
            self._closed = error

    def resize(self, request_id: int, tokens: int) -> None:
        """The true length of a prompt that was registered by an estimate."""
        with self._lock:
            if request_id in self._queued:
                self._tokens += tokens - self._queued[request_id]
                self._queued[request_id] = tokens

    def scheduled(self, request_id: int) -> None:
        """The request left the queue (for good: a preempted one does not count again)."""
        with self._lock:
            self._leave(request_id)

    def ended(self, request_id: int) -> None:
        """The request ended: its label is free, unless another one of that label lives."""
        with self._lock:
            self._leave(request_id)
            label = self._label_of.pop(request_id, None)
            if label is None:
                return
            self._labels[label] -= 1
            if not self._labels[label]:
                del self._labels[label]

    def _leave(self, request_id: int) -> None:
        tokens = self._queued.pop(request_id, None)
        if tokens is not None:
            self._tokens -= tokens
            self._left_at.append(time.monotonic())

    def _full(self, why: str, label: str) -> QueueFullError:
        retry_after = 1.0
        if len(self._left_at) > 1:
            span = time.monotonic() - self._left_at[0]
            retry_after = min(max(span / len(self._left_at), 0.01), 60.0)
        return QueueFullError(
            f"{why}; try again in about {retry_after:.2f} s", retry_after=retry_after, request_id=label
        )
