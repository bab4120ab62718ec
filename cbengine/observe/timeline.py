"""A recorder of what every step does and when, and the trace that it writes.

`AsyncEngine.timeline()` switches it on. While it is off, what is left of it in the step loop is a test for None.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SPANS = 2_000_000
"""Spans that are kept, about 200 MB of memory; what comes later is counted and dropped."""

STEP, IDLE = "step", "idle"
"""Names of two spans: a step on the device, and the engine thread asleep because there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one thread did, in seconds of `time.perf_counter`."""

    thread: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of the steps went, in seconds, summed over pairs of steps that followed each other."""

    steps: int
    """Pairs that were looked at."""
    period: float
    """From the end of one step to the end of the next, without the time in which there was nothing to do."""
    waited: float
    """Part of it in which the device was ready and had to wait for the host: from the end of a step to the start of the
    next."""
    prepared: float
    """Part of it that the device's own thread spent in a step outside of the forward and the sampling."""
    host: float
    """What the engine thread worked in all that time, most of it while the device computed."""

    @property
    def waited_share(self) -> float:
        """Host work that the device waits for, as a share of the steps' time: `waited` and `prepared` together."""
        return (self.waited + self.prepared) / self.period if self.period > 0 else 0.0


class Timeline:
    """Spans of all threads that take part in a step. Any thread may add to it."""

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._max_spans = max_spans
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self.dropped = 0
        """Spans that there was no room for."""

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, name: str, start: float, end: float | None = None, **args: Any) -> None:
        """The calling thread did `name` from `start` to `end` (default: now), by `time.perf_counter()`."""
        span = Span(threading.current_thread().name, name, start, time.perf_counter() if end is None else end, args)
        with self._lock:
            if len(self._spans) < self._max_spans:
                self._spans.append(span)
            else:
                self.dropped += 1

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """`with timeline.span("fill"):` records what is inside, an exception included."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, **args)

    def timed(self, name: str, fn: Callable[[], Any], **args: Any) -> Callable[[], Any]:
        """`fn`, recorded whenever and on whichever thread it is called."""

        def run() -> Any:
            with self.span(name, **args):
                return fn()

        return run

    @property
    def spans(self) -> list[Span]:
        """What has been recorded so far, as a list of its own."""
        return list(self._spans)

    # --- what it tells ---------------------------------------------------------------------------------------------

    def shares(self, *, min_decodes: int = 1, decode_only: bool = True) -> Shares:
        """How the time of steps was spent.

        Args:
            min_decodes: only steps in which at least so many requests decode.
            decode_only: only steps that compute no prompts.
        """
        return shares(self._spans, min_decodes=min_decodes, decode_only=decode_only)

    def seconds(self, name: str) -> float:
        """The sum of all spans of a name."""
        return sum(span.seconds for span in self._spans if span.name == name)

    def host_seconds(self) -> float:
        """What the engine thread worked: all of its spans but those in which it waits."""
        return sum(_work_of(span) for span in self._spans)

    # --- what it writes --------------------------------------------------------------------------------------------

    def chrome(self) -> dict[str, Any]:
        """The trace in the format of chrome://tracing and https://ui.perfetto.dev (JSON object format, complete events)."""
        spans = self.spans
        zero = min((span.start for span in spans), default=0.0)
        threads = {name: number for number, name in enumerate(sorted({span.thread for span in spans}), 1)}
        process = os.getpid()
        names = [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": tid, "args": {"name": name}}
            for name, tid in threads.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "cat": "cbengine",
                "pid": process,
                "tid": threads[span.thread],
                "ts": round((span.start - zero) * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "args": dict(span.args),
            }
            for span in sorted(spans, key=lambda span: (span.start, -span.end))
        ]
        return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"dropped_spans": self.dropped}}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file. Raises `OSError` where that cannot be."""
        Path(path).write_text(json.dumps(self.chrome()), encoding="utf-8")


_HOST = (
    "intake",
    "plan",
    "fill",
    "launch",
    "commit",
    "emit",
)  # what an engine thread does in a turn; "text" is in "commit"


def _work_of(span: Span) -> float:
    return span.seconds if span.name in _HOST else 0.0


def shares(spans: Iterable[Span], *, min_decodes: int = 1, decode_only: bool = True) -> Shares:
    """See `Timeline.shares`. Steps of several engines must not be mixed."""
    steps: list[Span] = []
    idle: list[Span] = []
    inside: list[Span] = []
    host: list[Span] = []
    kinds = {STEP: steps, IDLE: idle, "forward": inside, "sample": inside} | dict.fromkeys(_HOST, host)
    for span in spans:
        if (kind := kinds.get(span.name)) is not None:
            kind.append(span)
    for kind in (steps, idle, inside, host):
        kind.sort(key=lambda span: span.start)
    sleeps, within, work = _Overlap(idle), _Overlap(inside), _Overlap(host)
    count, period, waited, prepared, worked = 0, 0.0, 0.0, 0.0, 0.0
    for before, step in itertools.pairwise(steps):
        slept = sleeps.of(before.end, step.start)
        computed, busy = within.of(step.start, step.end), work.of(before.end, step.end)
        if step.args.get("decodes", 0) < min_decodes or (decode_only and step.args.get("prompt_tokens", 0)):
            continue
        count += 1
        period += step.end - before.end - slept
        waited += max(0.0, step.start - before.end - slept)
        prepared += max(0.0, step.seconds - computed)
        worked += busy
    return Shares(count, period, waited, prepared, worked)


class _Overlap:
    """How much of an interval is covered by spans, which are sorted and do not overlap. Asked for intervals that only
    ever move on."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._first = 0

    def of(self, start: float, end: float) -> float:
        spans = self._spans
        while self._first < len(spans) and spans[self._first].end <= start:
            self._first += 1
        total, at = 0.0, self._first
        while at < len(spans) and spans[at].start < end:
            total += max(0.0, min(end, spans[at].end) - max(start, spans[at].start))
            at += 1
        return total
