"""The step cycle. Engine thread only.

    take in commands → plan batch N + 1 → fill its slot → launch it → commit batch N → text → hand over

One direction, no callbacks upwards. `turn()` is one cycle, so that a test can drive the loop by hand; `run()` turns until
it is told to stop, and sleeps in the inbox when there is nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cbengine.bridge.inbox import Cancel, Command, Inbox, Pause, Read, Resume, Stop, Submit, Tokenized
from cbengine.bridge.outbox import Outbox
from cbengine.bridge.ports import LoopPort
from cbengine.cache.manager import CacheManager
from cbengine.devices.base import DeviceLostError
from cbengine.errors import EngineStoppedError, RequestFailedError
from cbengine.execution.batch import BatchFiller
from cbengine.execution.commit import Committer, failure
from cbengine.execution.deadlines import Deadlines, timeout_error
from cbengine.execution.forecast import Forecast
from cbengine.execution.pipeline import Launched, Pipeline
from cbengine.execution.slots import SlotState
from cbengine.observe.counters import Counters
from cbengine.observe.timeline import IDLE, Timeline
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.scheduling.admission import Registry
from cbengine.scheduling.base import Scheduler
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import RowTable
from cbengine.text.stop import StopMatcher


@dataclass(slots=True)
class LoopParts:
    """What the loop drives; made by `execution.build`."""

    rows: RowTable
    cache: CacheManager
    lifecycle: Lifecycle
    scheduler: Scheduler
    filler: BatchFiller
    pipeline: Pipeline
    committer: Committer
    inbox: Inbox
    outbox: Outbox
    registry: Registry
    counters: Counters
    requests: dict[int, Request]
    """All living requests."""
    make_detokenizer: Callable[..., object] | None


_LOOK_AT_LOOPS = 1.0
"""Seconds between looks at the loops of readers that hold their requests up."""


class StepLoop:
    """Drives the parts until it is stopped."""

    def __init__(self, parts: LoopParts) -> None:
        self.parts = parts
        parts.lifecycle.on_change = self._on_change
        parts.lifecycle.on_requeue = self._requeue
        parts.outbox.on_closed = self._on_closed
        self._deadlines = Deadlines()
        self._pauses = 0
        self._pause_replies: list[Callable[[], object]] = []
        self._draining = False
        self._stopping = False
        self._committed_at = 0.0
        self._forecast = Forecast()
        self._timeline: Timeline | None = None

    @property
    def recording(self) -> bool:
        return self._timeline is not None

    def record(self, timeline: Timeline | None) -> None:
        """Record every step from now on, or (None) no more. Any thread."""
        self.parts.pipeline.timeline = self.parts.committer.timeline = self._timeline = timeline

    @property
    def stopped(self) -> bool:
        """True once a stop is through: nothing alive, nothing in flight."""
        if self.parts.pipeline.num_in_flight:
            return False
        return self._stopping or (self._draining and not self.parts.requests)

    def run(self) -> None:
        """Turn until stopped. Raises what ends the engine: a lost device, or a defect of the engine itself."""
        while True:
            busy = self.turn()
            if self.stopped:
                return
            if not busy:
                self._sleep()

    def _sleep(self) -> None:
        """Wait for a command, or the next deadline. A frame of its own: while the engine sleeps, nothing refers to the
        request that came last."""
        timeout = self._deadlines.wait()
        if self.parts.rows.held.any() or self._held_out:
            # Nothing is ever posted for who waits for its reader, so that nobody would notice that the reader's loop has
            # gone: the one thing that has to be looked at.
            timeout = min(_LOOK_AT_LOOPS, timeout or _LOOK_AT_LOOPS)
        timeline, start = self._timeline, time.perf_counter()
        command = self.parts.inbox.wait(timeout)
        if timeline is not None:
            timeline.add(IDLE, start)
        if command is not None:
            self._handle(command)
        elif timeout == _LOOK_AT_LOOPS:
            self._leave_closed_loops()

    def _leave_closed_loops(self) -> None:
        for port in {request.reader.port for request in self.parts.requests.values() if request.held}:
            if port.is_gone:
                port.closed = True
                self._on_closed(port)

    def turn(self) -> bool:
        """One cycle. False if there was nothing to do, so that only a command can bring more."""
        parts, timeline = self.parts, self._timeline
        self._bide()
        start = time.perf_counter()
        while (command := parts.inbox.take()) is not None:
            self._handle(command)
        for late in self._deadlines.expired(parts.requests):
            self.end(late, RequestStatus.FAILED, FinishReason.TIMEOUT, timeout_error(late))
        if timeline is not None:
            timeline.add("intake", start)
        launched = self._launch()
        committed = False
        if parts.pipeline.num_in_flight and (parts.pipeline.full or not launched):
            self._commit()
            committed = True
        if not launched and not committed:
            launched = parts.lifecycle.wait_for_transfers()
            if not launched and not self._pauses and not self._stopping:
                launched = self._unstick()
        if self._pause_replies and not parts.pipeline.num_in_flight:
            self._acknowledge_pauses()
        start = time.perf_counter()
        parts.outbox.flush()
        if timeline is not None:
            timeline.add("emit", start)
        return launched or committed

    # --- commands --------------------------------------------------------------------------------------------------

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Cancel(request_id):
                request = self.parts.requests.get(request_id)
                if request is not None:
                    self.end(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)
            case Tokenized():
                self._tokenized(command)
            case Read(request_id):
                self._read(request_id)
            case Pause(done):
                self._pauses += 1
                self._pause_replies.append(done)
            case Resume():
                self._pauses = max(0, self._pauses - 1)
            case Stop(drain, silent):
                self.parts.outbox.muted = silent
                self._stop(drain)

    def _submit(self, request: Request) -> None:
        parts = self.parts
        parts.requests[request.id] = request
        self._deadlines.add(request, parts.requests)
        if self._stopping or self._draining:
            self.end(request, RequestStatus.FAILED, FinishReason.ERROR, stopped_error(request.label))
            return
        if parts.make_detokenizer is not None:
            try:
                make = parts.make_detokenizer
                request.detokenizer = make(request.keep) if request.keep else make()
                params = request.params
                if params.stop:
                    include, after = params.include_stop_str_in_output, params.min_new_tokens
                    request.stops = StopMatcher(params.stop, include=include, after=after)
            except BaseException as error:  # a panic of a tokenizer written in Rust is no Exception
                self.end(request, RequestStatus.FAILED, FinishReason.ERROR, failure(request.label, error))
                return
        if request.prompt is not None:
            parts.scheduler.add(request)

    def _read(self, request_id: int) -> None:
        """A reader has read on: schedule its request again, if it was held up and there is room in its buffer now."""
        request = self.parts.requests.get(request_id)
        if request is None or not request.held or self.parts.committer.unread(request) >= request.stream_buffer:
            return
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Schedule again what was held up for its reader."""
        request.held = False
        if request.row >= 0:
            self.parts.rows.held[request.row] = False
        elif request.saved is not None:
            self.parts.scheduler.add(request)

    @property
    def _held_out(self) -> bool:
        """Whether a request waits outside of the queue for its reader."""
        return any(request.held and request.row < 0 for request in self.parts.requests.values())

    def _requeue(self, request: Request) -> None:
        """A preempted request has given everything back. One whose reader is behind waits for its reader first."""
        if not request.held:
            self.parts.scheduler.add(request)

    def _tokenized(self, command: Tokenized) -> None:
        request = self.parts.requests.get(command.request_id)
        if request is None:
            return
        if command.error is not None:
            self.end(request, RequestStatus.FAILED, FinishReason.ERROR, command.error)
            return
        assert command.prompt is not None
        request.prompt, request.limit = command.prompt, command.limit
        if command.edit is not None:
            request.edit = command.edit
        self.parts.registry.resize(request.id, len(command.prompt))
        self.parts.scheduler.add(request)

    def _stop(self, drain: bool) -> None:
        self._pauses = 0  # a stop lifts every pause: whoever holds one could not take it back any more
        if drain:
            self._draining = True
            # ... and no reader holds its request up any more: what is left is bounded, and waits in its stream.
            self.parts.committer.watch_readers = False
            for request in self.parts.requests.values():
                if request.held:
                    self._let_go(request)
            return
        self._stopping = True
        for request in list(self.parts.requests.values()):
            self.end(request, RequestStatus.FAILED, FinishReason.ERROR, stopped_error(request.label))

    def _acknowledge_pauses(self) -> None:
        replies, self._pause_replies = self._pause_replies, []
        for reply in replies:
            reply()

    # --- steps -----------------------------------------------------------------------------------------------------

    def _bide(self) -> None:
        """While a step runs and none is behind it: let others come, until the next one has to be planned.

        Only where one who comes now would be in the next step."""
        parts = self.parts
        if parts.pipeline.num_in_flight != 1 or parts.pipeline.full or self._pauses or self._stopping:
            return
        if parts.scheduler.num_waiting or not parts.rows.num_free:
            return
        running, start = parts.pipeline.oldest(), time.perf_counter()
        decodes = running.filled.plan.num_decodes
        wait = self._forecast.wait(decodes, running.filled.num_tokens - decodes)
        began = max(self._committed_at, running.at)
        if wait and began + wait > start:
            parts.pipeline.doze(began + wait)
            if self._timeline is not None:
                self._timeline.add("bide", start)

    def _launch(self) -> bool:
        """Prepare and launch the next step. False if there is none, or no slot for it."""
        parts = self.parts
        if self._pauses or self._stopping or parts.pipeline.full:
            return False
        timeline, planning = self._timeline, time.perf_counter()
        plan = parts.scheduler.plan()
        if not plan:
            return False
        start = time.perf_counter()
        if timeline is not None:
            timeline.add("plan", planning, start)
        slot = parts.pipeline.free_slot()
        try:
            filled = parts.filler.fill(slot, plan)
        except Exception as error:
            slot.state = SlotState.FREE
            parts.committer.fail(plan.rows, error)
            return True
        filled_at = time.perf_counter()
        parts.pipeline.launch(parts.lifecycle.step_launched(), slot, filled)
        end = time.perf_counter()
        parts.counters.launched(end - start)
        self._forecast.launched(end - planning)
        if timeline is not None:
            timeline.add("fill", start, filled_at)
            timeline.add("launch", filled_at, end)
        return True

    def _commit(self) -> None:
        parts, timeline = self.parts, self._timeline
        launched = parts.pipeline.oldest()
        error: Exception | None = None
        ids = None
        start = time.perf_counter()
        try:
            ids = parts.pipeline.wait()
        except DeviceLostError:
            raise
        except Exception as caught:
            error = caught
        start, waiting = time.perf_counter(), start
        if ids is not None:
            self._measure(launched)
            parts.committer.commit(launched.filled, ids)
        else:
            assert error is not None
            parts.committer.fail(launched.filled.rows, error)
        parts.lifecycle.step_committed(launched.step)
        parts.counters.committed(parts.committer.tokens)
        if timeline is not None:
            timeline.add("wait", waiting, start)
            timeline.add("commit", start)

    def _measure(self, launched: Launched) -> None:
        """How long steps take: for the forecast, and for weighing swapping against computing again, for which those that
        are mostly prompt tell."""
        now, swap, filled = time.perf_counter(), self.parts.cache.swap, launched.filled
        decodes, tokens = filled.plan.num_decodes, filled.num_tokens
        seconds = now - max(self._committed_at, launched.at)
        self._forecast.saw(decodes, tokens - decodes, seconds)
        if swap is not None and tokens >= 2 * decodes + 8:
            swap.costs.computed(tokens, seconds)
        self._committed_at = now

    def _unstick(self) -> bool:
        """Nothing runs, nothing is in flight, yet somebody waits: that must not be, and it must not last (I5)."""
        scheduler, rows = self.parts.scheduler, self.parts.rows
        running = scheduler.num_running - rows.num_held
        if running:
            raise AssertionError(f"{running} requests are running, but none can be scheduled")
        head = scheduler.head()
        if head is None:
            return False
        held = [request for request in rows.requests if request is not None and request.held]
        if held:
            # Everybody who runs waits for a slow reader. Whoever waits for their pages must not wait for that reader too.
            newest = max(held, key=lambda request: request.id)
            scheduler.remove(newest)
            self.parts.lifecycle.transition(newest, RequestStatus.PREEMPTED)
            return True
        error = RequestFailedError(
            f"request {head.label!r} can never be scheduled: it needs "
            f"{self.parts.cache.blocks_for(len(head.tokens) + 1)} blocks and {self.parts.cache.num_free} of "
            f"{self.parts.cache.capacity} are free with nothing else running",
            request_id=head.label,
        )
        self.end(head, RequestStatus.FAILED, FinishReason.ERROR, error)
        return True

    # --- ends ------------------------------------------------------------------------------------------------------

    def end(
        self,
        request: Request,
        status: RequestStatus,
        reason: FinishReason,
        error: BaseException | None = None,
    ) -> None:
        """End a request for a reason that lies outside of its steps."""
        self.parts.lifecycle.transition(request, status, reason, error)

    def _on_change(self, request: Request) -> None:
        """The lifecycle changed `request`: keep the books, tell its reader."""
        parts = self.parts
        status = request.status
        if status is RequestStatus.PREFILLING and request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            parts.registry.scheduled(request.id)
        elif status.ended:
            parts.scheduler.remove(request)
            parts.registry.ended(request.id)
            parts.counters.ended(status)
        parts.outbox.event(request)
        if status.ended:
            # Last, so that whatever goes wrong above, `abandon` finds the request among the living and tells its reader.
            del parts.requests[request.id]

    def _on_closed(self, port: LoopPort) -> None:
        """A loop is gone: its readers have left."""
        for request in [r for r in self.parts.requests.values() if r.reader.port is port]:
            self.end(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def refuse_rest(self) -> None:
        """The loop has stopped and nobody else gets in: what is still in the inbox gets its answer."""
        self._stopping = True
        while (command := self.parts.inbox.take()) is not None:
            self._handle(command)
        self.parts.outbox.flush()

    def abandon(self, error: Callable[[str], Exception]) -> None:
        """The engine is dead: tell every reader, once, and touch nothing else, for nothing else can be relied on."""
        parts = self.parts
        while (command := parts.inbox.take()) is not None:
            if isinstance(command, Submit):
                parts.requests[command.request.id] = command.request
        for request in list(parts.requests.values()):
            request.status, request.finish_reason = RequestStatus.FAILED, FinishReason.ERROR
            request.error = error(request.label)
            parts.counters.ended(request.status)
            parts.registry.ended(request.id)
            parts.outbox.event(request)
        parts.requests.clear()
        parts.outbox.flush()


def stopped_error(label: str) -> EngineStoppedError:
    return EngineStoppedError(
        f"the engine was stopped before request {label!r} had finished; start it again and repeat the request",
        request_id=label,
    )
