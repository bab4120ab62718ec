"""A device that runs its streams in a seeded legal order, and finds what is not ordered."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch

from cbengine.devices.base import DeviceLostError, Event, MemoryInfo, Stream
from cbengine.devices.host import HostDevice, run_operation
from cbengine.testing.races import HOST, Clock, RaceDetector, RaceError


class SimDeadlock(DeviceLostError):
    """Somebody waits for an event that can never be reached."""


@dataclass(slots=True)
class _Mark:
    """One recording of an event. `position`: how many items its stream has run when it is reached."""

    stream: SimStream
    position: int
    clock: Clock
    reached: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class _Operation:
    name: str
    fn: Callable[[], Any]
    completes: bool = True  # False: the first half of a torn copy


@dataclass(slots=True)
class _Record:
    mark: _Mark


@dataclass(slots=True)
class _Wait:
    mark: _Mark


class SimStream(Stream):
    """A queue that moves only when the device picks it."""

    def __init__(self, name: str, timeline: int) -> None:
        self.name = name
        self.timeline = timeline
        self.items: deque[_Operation | _Record | _Wait] = deque()
        self.launched = 0  # items ever queued
        self.executed = 0  # items ever run
        self.error: BaseException | None = None  # what the open span raised
        self.running = False

    def push(self, item: _Operation | _Record | _Wait) -> None:
        self.items.append(item)
        self.launched += 1

    def ready(self) -> bool:
        """True if the next item may run now."""
        if not self.items or self.running:
            return False
        head = self.items[0]
        return not isinstance(head, _Wait) or head.mark.reached


class SimEvent(Event):
    """The newest mark of an event, reached or not."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self.name = name
        self.device = device
        self.mark: _Mark | None = None

    def synchronize(self) -> None:
        self.device.synchronize_event(self)

    def query(self) -> bool:
        return self.device.query_event(self)


class SimDevice(HostDevice):
    """Lazy streams in a seeded legal interleaving, with a race check: hundreds of schedules of one loop in a second.

    Nothing runs by itself. At every call of the host a few operations may run (how many, and from which streams,
    follows from the seed), and a `synchronize()` runs what the awaited mark depends on and no more. So an operation
    runs at any moment that the ordering rules allow, now and then at the worst.

    A race is found whatever order was picked: `launch`, `copy` and `host_access` raise `RaceError` where two accesses
    to the same tensor storage or tag, one of them a write, are not ordered. A race and a deadlock end the device: this
    and every later call raises, and `fault` keeps the error.

    Args:
        seed: same seed and same calls, same order.
        check_races: look at `reads`, `writes`, `copy` and `host_access`. Off, a hazard shows as wrong data only.
        torn_copies: a copy runs in two halves with whatever else in between, so that a racing write tears it.
        eagerness: chance in [0, 1) that one more operation runs at a host call. Default: drawn from the seed.
        drop: called with the kind ("wait", "record" or "synchronize") and the event's name at each such call; True
            makes the call do nothing. This injects hazards from outside of the code under test.
        memory: what `memory_info()` returns. Default: the RAM of the machine.

    Not thread-safe, and operations must not call the device.
    """

    name = "sim"
    overlaps = True

    def __init__(
        self,
        seed: int = 0,
        *,
        check_races: bool = True,
        torn_copies: bool = True,
        eagerness: float | None = None,
        drop: Callable[[str, str], bool] | None = None,
        memory: MemoryInfo | None = None,
    ) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        drawn = self._rng.choice((0.0, 0.1, 0.3, 0.5, 0.8))  # drawn in any case: the rest of the order stays the same
        self._eagerness = drawn if eagerness is None else eagerness
        if not 0.0 <= self._eagerness < 1.0:
            raise ValueError(f"eagerness must be in [0, 1), got {eagerness!r}")
        # Chance that the stream that ran last goes on: some seeds mix finely, others let one stream run far ahead.
        self._stickiness = self._rng.choice((0.0, 0.5, 0.9))
        self._last: SimStream | None = None
        self._running = 0  # operations that are running now; more than one only where one waits for another
        self.checks = check_races
        self._races = RaceDetector()
        self._torn_copies = torn_copies
        self._drop = drop
        self._memory = memory
        self._streams: dict[str, SimStream] = {}
        self._all: list[SimStream] = []
        self.trace: list[tuple[str, str]] = []
        """(stream, name) of every operation and copy that ran, in the order in which they ended. Skipped ones are not
        in it."""

    @property
    def fault(self) -> DeviceLostError | None:
        """What ended the device (a `RaceError`, a `SimDeadlock` or a `DeviceLostError` of an operation), or None."""
        return self._health.fault

    def stream(self, name: str) -> SimStream:
        """The stream of this name, made by the first call."""
        self._enter()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = SimStream(name, self._races.add_timeline())
            self._all.append(stream)
        return stream

    def event(self, name: str = "") -> SimEvent:
        return SimEvent(self, name)

    def launch(
        self,
        stream: Stream,
        fn: Callable[[], Any],
        *,
        name: str = "",
        reads: Iterable[Hashable | torch.Tensor] = (),
        writes: Iterable[Hashable | torch.Tensor] = (),
    ) -> None:
        own = self._own(stream)
        name = name or getattr(fn, "__name__", "operation")
        self._check_access(own, name, reads, writes)
        own.push(_Operation(name, fn))
        self._progress()

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        own = self._own(stream)
        self._check_access(own, "copy", (src,), (dst,))
        parts = _halves(dst, src) if self._torn_copies else [(dst, src)]
        for to, from_ in parts:
            own.push(_Operation("copy", _copier(to, from_), completes=to is parts[-1][0]))
            self._progress()

    def record(self, event: Event, stream: Stream) -> None:
        own, own_event = self._own(stream), self._own_event(event)
        if not self._dropped("record", own_event):
            own_event.mark = _Mark(own, own.launched + 1, self._races.mark(own.timeline))
            own.push(_Record(own_event.mark))
        self._progress()

    def wait(self, stream: Stream, event: Event) -> None:
        own, own_event = self._own(stream), self._own_event(event)
        mark = own_event.mark  # the newest one now, whatever is recorded later
        if not self._dropped("wait", own_event) and mark is not None:
            self._races.join(own.timeline, mark.clock)
            own.push(_Wait(mark))
        self._progress()

    def host_access(
        self, *, reads: Iterable[Hashable | torch.Tensor] = (), writes: Iterable[Hashable | torch.Tensor] = ()
    ) -> None:
        self._enter()
        self._check_access(None, "the host", reads, writes)
        self._progress()

    def synchronize(self) -> None:
        self._health.check()
        while self._step(self._all):
            pass
        stuck = [stream.name for stream in self._all if stream.items or stream.running]
        if stuck:
            self._deadlock(f"the host waits for all streams, and {', '.join(stuck)} can never become empty")
        self._races.join_everything()
        self._health.check()

    def memory_info(self) -> MemoryInfo:
        return super().memory_info() if self._memory is None else self._memory

    def close(self) -> None:
        while self._health.fault is None and self._step(self._all):
            pass
        for stream in self._all:
            stream.items.clear()
        self._health.closed = True

    # What `SimEvent` asks for.

    def synchronize_event(self, event: SimEvent) -> None:
        self._health.check()
        mark = event.mark
        if not self._dropped("synchronize", event) and mark is not None:
            self._drain(mark)
            if not self._running:  # an operation that waits is not the host
                self._races.join(HOST, mark.clock)
            error, mark.error = mark.error, None
            if error is not None:
                raise error
        self._progress()
        self._health.check()

    def query_event(self, event: SimEvent) -> bool:
        self._health.check()
        self._progress()
        mark = event.mark
        if mark is None:
            return True
        # A host that polls must get there in the end, also under a seed that runs nothing by itself.
        if not mark.reached and self._rng.random() < 0.5:
            self._step(self._all)
        if mark.reached:
            self._races.join(HOST, mark.clock)
        return mark.reached

    # Running.

    def _progress(self) -> None:
        """A call of the host: the device may run 0 to k operations."""
        if not self._running:
            while self._rng.random() < self._eagerness and self._step(self._all):
                pass

    def _drain(self, mark: _Mark) -> None:
        """Run what `mark` depends on, in some legal order, and nothing else."""
        needed = _needed(mark)
        while not mark.reached:
            behind = [stream for stream, position in needed.items() if stream.executed < position]
            if not self._step(behind):
                names = ", ".join(sorted(stream.name for stream in needed))
                self._deadlock(
                    f"an event on {mark.stream.name} can never be reached, and is waited for; at rest: {names}"
                )

    def _step(self, streams: Iterable[SimStream]) -> bool:
        """Run the next item of one of these streams; False if none can run."""
        ready = [stream for stream in streams if stream.ready()]
        if not ready:
            return False
        stream = self._last
        if stream is None or stream not in ready or self._rng.random() >= self._stickiness:
            stream = ready[int(self._rng.random() * len(ready))]
        self._last = stream
        item = stream.items.popleft()
        stream.executed += 1
        if isinstance(item, _Record):
            item.mark.error, stream.error = stream.error, None
            item.mark.reached = True
        elif isinstance(item, _Operation) and stream.error is None and self._health.fault is None:
            self._run(stream, item)
        return True

    def _run(self, stream: SimStream, item: _Operation) -> None:
        self._running += 1
        stream.running = True
        with torch.inference_mode():
            stream.error = run_operation(item.fn, self._health)
        stream.running = False
        self._running -= 1
        if stream.error is None and item.completes:
            self.trace.append((stream.name, item.name))

    # Checks.

    def _enter(self) -> None:
        if self._running:
            raise RuntimeError("an operation called the device: only the host may (it runs on the stream's own thread)")
        self._health.check_open()

    def _own(self, stream: Stream) -> SimStream:
        self._enter()
        if not isinstance(stream, SimStream) or self._streams.get(stream.name) is not stream:
            raise TypeError(f"a stream of another device was used: {stream!r}")
        return stream

    def _own_event(self, event: Event) -> SimEvent:
        if not isinstance(event, SimEvent) or event.device is not self:
            raise TypeError(f"an event of another device was used: {event!r}")
        return event

    def _dropped(self, kind: str, event: SimEvent) -> bool:
        return self._drop is not None and self._drop(kind, event.name)

    def _check_access(
        self,
        stream: SimStream | None,
        name: str,
        reads: Iterable[Hashable | torch.Tensor],
        writes: Iterable[Hashable | torch.Tensor],
    ) -> None:
        if not self.checks:
            return
        try:
            if stream is None:
                self._races.host(name, reads, writes)
            else:
                self._races.operation(stream.timeline, f"{name} on {stream.name}", reads, writes)
        except RaceError as race:
            self._health.fault = race
            raise

    def _deadlock(self, message: str) -> NoReturn:
        error = SimDeadlock(message)
        self._health.fault = error
        raise error


def _needed(mark: _Mark) -> dict[SimStream, int]:
    """How far each stream has to run for `mark` to be reached: through all waits on the way."""
    needed: dict[SimStream, int] = {}
    pending = [mark]
    while pending:
        mark = pending.pop()
        stream = mark.stream
        start = needed.get(stream, stream.executed)
        if mark.reached or mark.position <= start:
            continue
        needed[stream] = mark.position
        for item in islice(stream.items, start - stream.executed, mark.position - stream.executed):
            if isinstance(item, _Wait):
                pending.append(item.mark)
    return needed


def _copier(dst: torch.Tensor, src: torch.Tensor) -> Callable[[], Any]:
    return lambda: dst.copy_(src)


def _halves(dst: torch.Tensor, src: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two halves along the first dimension that can be cut; the whole where there is none."""
    if dst.shape == src.shape:  # else the copy itself says what is wrong
        for dim, size in enumerate(dst.shape):
            if size > 1:
                half = size // 2
                return [
                    (dst.narrow(dim, 0, half), src.narrow(dim, 0, half)),
                    (dst.narrow(dim, half, size - half), src.narrow(dim, half, size - half)),
                ]
    return [(dst, src)]
