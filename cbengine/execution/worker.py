"""The engine thread: loads the model, builds the loop, runs it, and cleans up after it, whatever happens.

Everything that touches the device happens here. Other threads see a state, post commands to the inbox, and are told of
the two things that they may wait for: that the thread is ready, and that it has ended.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from cbengine.bridge.inbox import Command, Inbox, Stop
from cbengine.cache.sizing import MemoryPlan
from cbengine.config import EngineConfig
from cbengine.devices.base import Device, DeviceLostError
from cbengine.errors import EngineDeadError, EngineError, UnsupportedFeatureError
from cbengine.execution.build import Built, build
from cbengine.execution.loop import stopped_error
from cbengine.execution.pipeline import Sampler
from cbengine.execution.sampler import sample
from cbengine.models.base import ModelRunner
from cbengine.observe.counters import EngineStats
from cbengine.observe.health import final_snapshot, snapshot
from cbengine.observe.timeline import Timeline
from cbengine.scheduling.admission import Registry
from cbengine.text.background import TokenizerThread
from cbengine.text.base import Tokenizer

logger = logging.getLogger("cbengine")

Notify = Callable[[BaseException | None], object]


class WorkerState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Loaded:
    """What the loader brings."""

    runner: ModelRunner
    tokenizer: Tokenizer | None


class Worker:
    """One run of the engine, from `start` to its end. Made anew for every start.

    `load()` and `make_device(config)` run on the engine thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[], Loaded],
        make_device: Callable[[EngineConfig], Device],
        sampler: Sampler = sample,
    ) -> None:
        self._config = config
        self._load = load
        self._make_device = make_device
        self._sampler = sampler
        self.inbox = Inbox()
        self.registry = Registry(config.max_queue_size, config.max_queued_tokens)
        self.state = WorkerState.STARTING
        self.stopping = False
        """A stop was asked for: no request gets in any more."""
        self.process = os.getpid()
        self.background = TokenizerThread()
        self.loaded: Loaded | None = None
        self.built: Built | None = None
        """Set while the engine can run."""
        self.last_stats: EngineStats | None = None
        """The counts as they were at the end."""
        self.memory: MemoryPlan | None = None
        self.config = config
        """With every inferred setting filled in, once built."""
        self.fault: BaseException | None = None
        """What ended the thread, if it did not end by a stop."""
        self._lock = threading.Lock()
        self._on_ready: list[Notify] = []
        self._on_end: list[Notify] = []
        self._replies: dict[int, Notify] = {}
        self._thread = threading.Thread(target=self._main, name="cbengine-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. It is a daemon, and stopped at exit, so that it never keeps a process alive."""
        _stop_at_exit(self)
        try:
            self._thread.start()
        except BaseException as fault:
            self.fault = fault
            self._set_state(WorkerState.ENDED)
            raise

    def close_admission(self) -> None:
        """Let nobody else in: a stop is on its way."""
        self.stopping = True
        self.registry.close(stopped_error)

    def stats(self) -> EngineStats:
        """The counts as of now, or as they were at the end. Any thread."""
        built = self.built
        if built is not None:
            return snapshot(built.loop.parts)
        return self.last_stats or EngineStats()

    def record(self, timeline: Timeline | None) -> None:
        """Record the steps from now on, or (None) no more. Raises what `AsyncEngine.timeline` says. Any thread."""
        built = self.built
        if timeline is not None:
            if built is None:
                raise self._ended_error()
            if built.config.device != "cpu":
                raise UnsupportedFeatureError(
                    f"a timeline of {built.config.device!r} cannot be recorded by the host; supported is 'cpu'. "
                    "Use torch.profiler, which asks the device"
                )
            if built.loop.recording:
                raise EngineError("a timeline of this engine is being recorded already; end that one first")
        if built is not None:
            built.loop.record(timeline)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    # --- from other threads ----------------------------------------------------------------------------------------

    def when_ready(self, notify: Notify) -> None:
        """Call `notify(None)` once the thread serves, or `notify(error)` if it never will."""
        with self._lock:
            if self.state is WorkerState.STARTING:
                self._on_ready.append(notify)
                return
        notify(None if self.memory is not None else self.fault)

    def when_ended(self, notify: Notify) -> None:
        """Call `notify(None)` once the thread has ended and given everything back."""
        with self._lock:
            if self.state is not WorkerState.ENDED:
                self._on_end.append(notify)
                return
        notify(None)

    def ask(self, make_command: Callable[[Callable[[], None]], Command], notify: Notify) -> None:
        """Send a command that is answered. `notify(error)` if the thread ends first: an answer always comes."""
        key = id(notify)

        def answer() -> None:
            with self._lock:
                waiting = self._replies.pop(key, None)
            if waiting is not None:
                waiting(None)

        with self._lock:
            ended = self.state is WorkerState.ENDED
            if not ended:
                self._replies[key] = notify
        if ended:
            notify(self._ended_error())
        else:
            self.inbox.put(make_command(answer))

    def _ended_error(self) -> EngineError:
        return dead_error("", self.fault) if self.fault is not None else stopped_error("")

    # --- on the engine thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        device: Device | None = None
        try:
            self.loaded = self._load()
            device = self._make_device(self._config)
            device.attach()
            tokenizer = self.loaded.tokenizer
            make_detokenizer = None if tokenizer is None else tokenizer.detokenizer
            self.built = build(
                self._config, self.loaded.runner, device, self.inbox, self.registry, make_detokenizer, self._sampler
            )
            self.memory, self.config = self.built.memory, self.built.config
            self._set_state(WorkerState.RUNNING)
            self.built.loop.run()
        except BaseException as fault:
            self.fault = fault
            self.stopping = (
                True  # before any reader hears of it: whoever then starts the engine again waits for the end
            )
            if self.built is not None:
                logger.error("the engine died", exc_info=fault)
        finally:
            self._end(device)

    def _end(self, device: Device | None) -> None:
        fault = self.fault
        self.registry.close(stopped_error if fault is None else lambda label: dead_error(label, fault))
        try:
            if self.built is not None:
                if fault is None:
                    self.built.loop.refuse_rest()
                else:
                    self.built.loop.abandon(lambda label: dead_error(label, fault))
        finally:
            try:
                self._release(device)
            finally:
                self._set_state(WorkerState.ENDED)  # whatever went wrong: somebody waits for it

    def _release(self, device: Device | None) -> None:
        """Give back the device's memory, its threads and the caller's model. A step of it may fail if the device has."""
        built, loaded = self.built, self.loaded
        steps: list[Callable[[], None]] = []
        if built is not None:
            steps.append(built.loop.parts.pipeline.drain)
        if loaded is not None:
            steps.append(loaded.runner.release)
        if device is not None:
            steps.append(device.close)
        if built is not None:
            steps.append(built.free)
        steps.append(self.background.close)
        for step in steps:
            try:
                step()
            except DeviceLostError:
                pass  # which is why the engine ends
            except Exception:
                logger.warning("while the engine ended, cleaning up failed", exc_info=True)
        if built is not None:
            self.last_stats = final_snapshot(built.loop.parts)
            self.built = None

    def _set_state(self, state: WorkerState) -> None:
        with self._lock:
            self.state = state
            ready, self._on_ready = self._on_ready, []
            ended: list[Notify] = []
            replies: list[Notify] = []
            if state is WorkerState.ENDED:
                ended, self._on_end = self._on_end, []
                replies, self._replies = list(self._replies.values()), {}
        for notify in ready:
            notify(None if self.memory is not None else self.fault)
        for notify in replies:
            notify(self._ended_error())
        for notify in ended:
            notify(None)


def dead_error(label: str, cause: BaseException | None) -> EngineDeadError:
    what = f"request {label!r} cannot be served: " if label else ""
    error = EngineDeadError(
        f"{what}the engine died of {type(cause).__name__}: {cause}; start() may be tried again",
        request_id=label or None,
    )
    error.__cause__ = cause
    return error


_alive: weakref.WeakSet[Worker] = weakref.WeakSet()
_registered = False


def _stop_at_exit(worker: Worker) -> None:
    """Stop `worker` before the interpreter goes: a daemon thread in the middle of torch would crash at exit."""
    global _registered
    _alive.add(worker)
    if not _registered:
        _registered = True
        atexit.register(_stop_all)


def _stop_all() -> None:
    workers = list(_alive)
    for worker in workers:
        worker.inbox.put(Stop(drain=False, silent=True))
    for worker in workers:
        worker.join(timeout=2.0)
