"""The CPU device: a stream is a worker thread, so the host plans the next step while this one computes.

The host's part of a step is Python and so are the calls of the operations, and both want the interpreter lock. At
Python's default switch interval (5 ms) whoever holds the lock keeps it for longer than most operations take, and the
overlap is lost: measured with a step of 13 torch calls, double buffering gained 1.01x at 5 ms, 1.20x at 0.5 ms and
1.3x to 1.5x at 50 to 100 µs. `ThreadedDevice.attach` therefore lowers the interval of the process, see there.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cbengine.devices.base import Event, Stream
from cbengine.devices.host import Health, HostDevice, run_operation
from cbengine.threads import set_own_num_threads

_SWITCH_INTERVAL = 1e-4  # seconds


class _SwitchInterval:
    """The interpreter's switch interval, lowered while anybody wants it low. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run `release` inside of `acquire`; the order below allows it
        self._users = 0
        self._before = 0.0
        self._ours = 0.0

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                if self._before > _SWITCH_INTERVAL:
                    sys.setswitchinterval(_SWITCH_INTERVAL)
                self._ours = sys.getswitchinterval()  # in whole microseconds, so not quite what was set

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            # If somebody else has set another value since, it is theirs to keep.
            if self._users == 0 and sys.getswitchinterval() == self._ours != self._before:
                sys.setswitchinterval(self._before + 5e-7)  # the interpreter cuts off fractions of a microsecond


_switch_interval = _SwitchInterval()


class _Mark:
    """One recording of an event: its generation. An object, so that recording the event again, on whatever stream,
    cannot satisfy a wait for an earlier recording. `reached` is set once, under the condition of the event."""

    __slots__ = ("condition", "error", "reached")

    def __init__(self, condition: threading.Condition) -> None:
        self.condition = condition
        self.reached = False
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        """Worker thread."""
        with self.condition:
            self.error = error
            self.reached = True
            self.condition.notify_all()

    def wait(self) -> None:
        """Any thread."""
        if not self.reached:
            with self.condition:
                self.condition.wait_for(lambda: self.reached)

    def wait_until(self, deadline: float) -> None:
        """Any thread."""
        if not self.reached:
            with self.condition:
                self.condition.wait_for(lambda: self.reached, max(0.0, deadline - time.perf_counter()))


@dataclass(slots=True)
class _Operation:
    fn: Callable[[], Any]


@dataclass(slots=True)
class _Record:
    mark: _Mark
    closes_span: bool


@dataclass(slots=True)
class _Wait:
    mark: _Mark


_Item = _Operation | _Record | _Wait | None  # None: the end


def _work(items: queue.SimpleQueue[_Item], health: Health, num_threads: int | None) -> None:
    """A worker thread. Knows neither its stream nor its device, so that both can be collected while it waits."""
    error: BaseException | None = None
    if num_threads is not None:
        # Whatever happens here, the queue is worked off: somebody waits for its marks.
        error = run_operation(partial(set_own_num_threads, num_threads), health)
    with torch.inference_mode():  # thread-local
        while (item := items.get()) is not None:
            if isinstance(item, _Operation):
                if error is None and health.fault is None:
                    error = run_operation(item.fn, health)
            elif isinstance(item, _Wait):
                item.mark.wait()
            elif item.closes_span:
                closed, error = error, None
                item.mark.reach(closed)
                closed = None
            else:
                item.mark.reach(None)
            item = None  # the queue may stay empty for long: keep nothing alive meanwhile


class ThreadedStream(Stream):
    """A queue and the daemon thread `cbengine-<name>` that works it off."""

    def __init__(self, name: str, health: Health, num_threads: int | None) -> None:
        self.name = name
        self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=(self.items, health, num_threads), name=f"cbengine-{name}", daemon=True
        )
        self.thread.start()
        # Ends the thread once: at close, or when a device that nobody closed is collected.
        self.end = weakref.finalize(self, self.items.put, None)
        self.end.atexit = False


class ThreadedEvent(Event):
    """The newest mark, and the condition that all its marks are waited for under."""

    def __init__(self, name: str, health: Health) -> None:
        self.name = name
        self._health = health
        self._condition = threading.Condition(threading.Lock())
        self.mark: _Mark | None = None

    def renew(self) -> _Mark:
        """Engine thread: a new mark, which is the newest from now on."""
        self.mark = _Mark(self._condition)
        return self.mark

    def synchronize(self) -> None:
        mark = self.mark
        if mark is not None:
            mark.wait()
            error, mark.error = mark.error, None
            if error is not None:
                raise error
        self._health.check()

    def query(self) -> bool:
        return self.mark is None or self.mark.reached

    def wait_until(self, deadline: float) -> None:
        mark = self.mark
        if mark is not None:
            mark.wait_until(deadline)


class ThreadedDevice(HostDevice):
    """Streams are worker threads; a step computes while the host prepares the next one.

    Args:
        num_threads: torch's intra-op threads in the worker of the stream "compute"; other threads keep what they have.
            Default: torch's own default. One is best beside a busy event loop, see `docs/architecture.md`.

    Operations run under `torch.inference_mode()`. What an operation raised is raised once, by `synchronize()` of the
    event that closes its span.
    """

    overlaps = True

    def __init__(self, num_threads: int | None = None) -> None:
        super().__init__()
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1 or None, got {num_threads!r}")
        self._num_threads = num_threads
        self._streams: dict[str, ThreadedStream] = {}
        self._end_attachment: weakref.finalize[..., ThreadedDevice] | None = None

    def attach(self) -> None:
        """Lower the switch interval of the process to 100 µs (if it is longer), once for each device.

        The old value comes back when the last attached device is closed or collected, unless somebody else has changed
        it meanwhile.
        """
        self._health.check_open()
        if self._end_attachment is None:
            _switch_interval.acquire()
            self._end_attachment = weakref.finalize(self, _switch_interval.release)
            self._end_attachment.atexit = False

    def stream(self, name: str) -> ThreadedStream:
        """The stream of this name, made (with its thread) by the first call."""
        self._health.check_open()
        stream = self._streams.get(name)
        if stream is None:
            stream = ThreadedStream(name, self._health, self._num_threads if name == "compute" else None)
            self._streams[name] = stream
        return stream

    def event(self, name: str = "") -> ThreadedEvent:
        return ThreadedEvent(name, self._health)

    def launch(
        self,
        stream: Stream,
        fn: Callable[[], Any],
        *,
        name: str = "",
        reads: Iterable[Hashable | torch.Tensor] = (),
        writes: Iterable[Hashable | torch.Tensor] = (),
    ) -> None:
        self._put(stream, _Operation(fn))

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._put(stream, _Operation(lambda: dst.copy_(src)))

    def record(self, event: Event, stream: Stream) -> None:
        self._own(stream)
        self._health.check_open()
        self._put(stream, _Record(_own_event(event).renew(), closes_span=True))

    def wait(self, stream: Stream, event: Event) -> None:
        mark = _own_event(event).mark  # the newest one now, whatever is recorded later
        if mark is None:
            self._own(stream)
            self._health.check_open()
        else:
            self._put(stream, _Wait(mark))

    def synchronize(self) -> None:
        for stream in self._streams.values():
            if stream.end.alive:
                # This mark leaves the span open: an error belongs to the event that closes it.
                mark = _Mark(threading.Condition(threading.Lock()))
                stream.items.put(_Record(mark, closes_span=False))
                mark.wait()
        self._health.check()

    def close(self) -> None:
        self._health.closed = True
        streams = list(self._streams.values())
        for stream in streams:
            stream.end()
        for stream in streams:
            stream.thread.join()
        if self._end_attachment is not None:
            self._end_attachment()

    def _put(self, stream: Stream, item: _Item) -> None:
        own = self._own(stream)
        self._health.check_open()
        own.items.put(item)

    def _own(self, stream: Stream) -> ThreadedStream:
        if not isinstance(stream, ThreadedStream) or self._streams.get(stream.name) is not stream:
            raise TypeError(f"a stream of another device was used: {stream!r}")
        return stream


def _own_event(event: Event) -> ThreadedEvent:
    if not isinstance(event, ThreadedEvent):
        raise TypeError(f"an event of another kind of device was used: {event!r}")
    return event
