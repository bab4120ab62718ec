"""Tokenizing long texts off the event loops, and off the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class TokenizerThread:
    """One daemon thread, started with its first job; jobs run in the order of their submission. Any thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job()`, which must not raise. Ignored once closed: whoever waited for it has been told of the end."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cbengine-tokenizer", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # no reference to a text while waiting for the next

    def close(self) -> None:
        """End the thread, after the jobs that it has."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
