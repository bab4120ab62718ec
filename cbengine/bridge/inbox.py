"""Commands to the engine thread, from any thread.

`SimpleQueue.put` may be called from anywhere, a garbage collection in the middle of another `put` included: that is what
makes it safe to cancel from a finalizer. The engine thread sleeps in `get` when it has nothing to do; nobody polls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from cbengine.scheduling.edit import LogitEdit
from cbengine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Take a request. Its prompt may follow (`Tokenized`)."""

    request: Request


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What a request was submitted without, because it takes a while: its prompt, and its grammar; or why there is none."""

    request_id: int
    prompt: np.ndarray | None
    limit: int
    error: BaseException | None = None
    edit: LogitEdit | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """The reader has left. Unknown and ended requests are ignored: the end and the cancel may cross."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Read:
    """A reader that may be holding its request up (backpressure "pause") has read on."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Launch nothing more; `done()` is called when nothing is in flight. Counted: as many resumes end it."""

    done: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Resume:
    """Take back one `Pause`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop: at once, with an error for every open stream, or after everything accepted has finished (`drain`)."""

    drain: bool
    silent: bool = False
    """The process is exiting: tell no reader. Those that are left run in daemon threads, which would only print it."""


Command = Submit | Tokenized | Cancel | Read | Pause | Resume | Stop


class Inbox:
    """An unbounded queue of commands; its bound is the admission at the call."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        """Any thread, finalizers included; never blocks."""
        self._queue.put(command)

    def take(self) -> Command | None:
        """The next command, or None. Engine thread only."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def wait(self, timeout: float | None = None) -> Command | None:
        """Sleep until there is a command, or until `timeout` seconds have passed (None then). Engine thread only."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None
