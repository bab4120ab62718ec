"""From the engine thread to the readers: everything of one step for one loop in one `call_soon_threadsafe`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cbengine.bridge.buffer import StreamBuffer
from cbengine.bridge.ports import LoopPort
from cbengine.outputs import FinishReason, RequestStatus, TokenLogprobs
from cbengine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class StatusEvent:
    """A change of state, the terminal one included."""

    status: RequestStatus
    reason: FinishReason | None
    error: BaseException | None
    first_scheduled_time: float | None
    preemptions: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Logprobs of further tokens of the prompt."""

    logprobs: list[TokenLogprobs]


class Delivery(NamedTuple):
    """One token of one reader, or one event (then `event` is set and the rest means nothing)."""

    reader: StreamBuffer
    token_id: int
    text: str
    event: StatusEvent | PromptReport | None = None
    logprobs: TokenLogprobs | None = None


class Outbox:
    """Collects what a step produced and posts it. Engine thread only."""

    on_closed: Callable[[LoopPort], None]
    """Hears of a loop that is gone, so that its requests can be cancelled: nobody else is disturbed. Set by the loop."""

    def __init__(self) -> None:
        self._pending: dict[LoopPort, list[Delivery]] = {}
        self._gone: set[LoopPort] = set()
        self.muted = False
        """Post nothing any more."""
        self.wakeups = 0
        """Posts to event loops so far."""

    def token(self, reader: StreamBuffer, token_id: int, text: str, logprobs: TokenLogprobs | None = None) -> None:
        """Queue one token for its reader."""
        self._add(reader, Delivery(reader, token_id, text, None, logprobs))

    def prompt(self, reader: StreamBuffer, logprobs: list[TokenLogprobs]) -> None:
        """Queue the logprobs of further tokens of the prompt."""
        self._add(reader, Delivery(reader, 0, "", PromptReport(logprobs)))

    def event(self, request: Request) -> None:
        """Queue the request's present state for its reader."""
        event = StatusEvent(
            request.status,
            request.finish_reason,
            request.error,
            request.first_scheduled_time,
            request.preemptions,
            request.prompt_len,
            request.cached_tokens,
        )
        self._add(request.reader, Delivery(request.reader, 0, "", event))

    def _add(self, reader: StreamBuffer, delivery: Delivery) -> None:
        port = reader.port
        if self.muted:
            return
        if port.closed:
            # Known already, perhaps from another thread's post, or from before this request was taken in.
            self._gone.add(port)
            return
        items = self._pending.get(port)
        if items is None:
            items = self._pending[port] = []
        items.append(delivery)

    def flush(self) -> None:
        """Post what has been queued: one wake-up for each loop."""
        if self._pending:
            pending, self._pending = self._pending, {}
            now = time.monotonic()
            for port, items in pending.items():
                self.wakeups += 1
                if not port.post(deliver, items, now):
                    self._gone.add(port)
        while self._gone:
            gone, self._gone = self._gone, set()
            for port in gone:
                self.on_closed(port)


def deliver(items: list[Delivery], now: float) -> None:
    """On the readers' loop: hand the items over, then wake each reader once. Runs no code of any consumer."""
    readers: dict[StreamBuffer, None] = {}
    for reader, token_id, text, event, logprobs in items:
        if event is None:
            if logprobs is not None:
                reader.logprobs.append(logprobs)
            reader.ids.append(token_id)
            reader.texts.append(text)
            reader.times.append(now)
        elif isinstance(event, PromptReport):
            reader.prompt_logprobs.extend(event.logprobs)
        else:
            _apply(reader, event)
        readers[reader] = None
    for reader in readers:
        reader.wake()
        if reader.reason is not None and reader.on_end is not None:
            on_end, reader.on_end = reader.on_end, None
            on_end()


def _apply(reader: StreamBuffer, event: StatusEvent) -> None:
    reader.status = event.status
    reader.first_scheduled_time = event.first_scheduled_time
    reader.preemptions = event.preemptions
    reader.prompt_tokens = event.prompt_tokens
    reader.cached_tokens = event.cached_tokens
    if event.reason is not None:
        assert reader.reason is None, "a stream has one terminal event"
        reader.reason, reader.error = event.reason, event.error
