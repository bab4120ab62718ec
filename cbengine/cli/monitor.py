"""What a process and its children take of the machine, and what others take of it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import psutil

from cbengine.cli.measures import percentile

DISTURBED = 0.05
"""Cores in use by other processes from which on a run counts as disturbed."""

_SAMPLE_SECONDS = 0.25  # looking at all processes takes milliseconds
_LAG_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """Of one stretch of time."""

    seconds: float
    peak_bytes: int
    """Most memory that the tree had resident at once; pages that its processes share count for each of them."""
    own_cores: float
    other_cores: float
    """What everything else on the machine computed meanwhile, in cores."""

    @property
    def disturbed(self) -> bool:
        return self.other_cores > DISTURBED


class ProcessTree:
    """A process and all its descendants."""

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)

    def usage(self) -> tuple[int, float]:
        """Bytes resident, and seconds computed (those of children that have ended included)."""
        resident, seconds = 0, 0.0
        with contextlib.suppress(psutil.Error):  # it has ended
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    with process.oneshot():
                        resident += process.memory_info().rss
                        cpu = process.cpu_times()
                        seconds += cpu.user + cpu.system + cpu.children_user + cpu.children_system
        return resident, seconds


def busy_seconds() -> float:
    """What all cores of the machine have computed since it started."""
    cpu = psutil.cpu_times()
    return cpu.user + cpu.system + getattr(cpu, "irq", 0.0) + getattr(cpu, "softirq", 0.0) + getattr(cpu, "nice", 0.0)


class Monitor:
    """Watches a tree of processes from a thread of its own, as a context manager.

    Args:
        pid: the root. Default: this process.
        also_ours: another process whose work is not somebody else's, such as the one that measures.
        sample_seconds: between looks at the memory; fewer looks disturb a process that watches itself less.
    """

    def __init__(
        self, pid: int | None = None, also_ours: int | None = None, sample_seconds: float = _SAMPLE_SECONDS
    ) -> None:
        self._tree = ProcessTree(pid)
        self._extra = None if also_ours is None else psutil.Process(also_ours)
        self._end = threading.Event()
        self._sample_seconds = sample_seconds
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._lock = threading.Lock()
        self._window_peak = 0
        self.peak_bytes = 0
        """Since it was made, loading included."""
        self._since = (0.0, 0.0, 0.0)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def begin(self) -> None:
        """A stretch of time begins."""
        with self._lock:
            self._window_peak = 0
        self._since = self._now()

    def end(self) -> Load:
        """What was used since `begin`."""
        wall, own, other = (after - before for before, after in zip(self._since, self._now(), strict=True))
        with self._lock:
            peak = self._window_peak
        return Load(wall, peak, own / wall, max(0.0, other / wall))

    def _now(self) -> tuple[float, float, float]:
        """The time, what the tree has computed, and what everybody else has."""
        resident, own = self._tree.usage()
        self._see(resident)
        ours = own
        if self._extra is not None:
            cpu = self._extra.cpu_times()
            ours += cpu.user + cpu.system
        return time.perf_counter(), own, busy_seconds() - ours

    def _see(self, resident: int) -> None:
        with self._lock:
            self._window_peak = max(self._window_peak, resident)
            self.peak_bytes = max(self.peak_bytes, resident)

    def _watch(self) -> None:
        while not self._end.wait(self._sample_seconds):
            self._see(self._tree.usage()[0])


class LoopLag:
    """How late an event loop runs what is due: an async context manager around the time that is measured."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.get_running_loop().create_task(self._measure())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self.seconds.append(max(0.0, time.perf_counter() - due))

    @property
    def p99(self) -> float | None:
        return percentile(self.seconds, 99)
