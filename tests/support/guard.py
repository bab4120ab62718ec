"""Two guards over event loops: nothing of ours may wait on one, and nothing of ours may compute on one for long.

`BlockingCalls` is on in every `aio` test: a blocking call (sleep, lock or event wait, file or socket I/O, input) made
on a running asyncio loop by code of cbengine raises `blockbuster.BlockingError` where it is made.

`LoopGuard` is the fixture `loop_guard`, for tests that ask for it. It adds up the CPU time that the loop's own thread
spends in each callback (a task step is one), less what the garbage collector took, and fails the test if a callback
used more than 20 ms. Wall time would not do: on a machine whose cores are busy with the model, or with something else,
a callback of a few microseconds can take many milliseconds by the clock without having done anything wrong. What wall
time would show in addition, a callback that waits, `BlockingCalls` finds. The steps of the test's own tasks count too,
so such a test must not compute much on the loop itself.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from typing import Any, Self

LIMIT = 0.020
"""Seconds of CPU time that one callback may use."""


class BlockingCalls:
    """Context manager: blocking calls by cbengine on an asyncio loop raise `blockbuster.BlockingError`."""

    def __enter__(self) -> Self:
        _blockbuster().activate()
        return self

    def __exit__(self, *_: object) -> None:
        _blockbuster().deactivate()


@functools.cache
def _blockbuster() -> Any:
    from blockbuster import BlockBuster

    return BlockBuster("cbengine")


class LoopGuard:
    """Records the CPU time of each callback that runs on a loop made by `tests.support.loops.new_loop`.

    `calls`, `total` and `worst` (seconds) are for reports; `slow` describes the callbacks above `limit`.
    """

    active: LoopGuard | None = None

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self.calls = 0
        self.total = 0.0
        self.worst = 0.0
        self.slow: list[str] = []
        self._gc_started = 0.0
        self._gc_spent: dict[int, float] = {}

    def __enter__(self) -> Self:
        assert LoopGuard.active is None, "one LoopGuard at a time"
        LoopGuard.active = self
        gc.callbacks.append(self._on_gc)
        return self

    def __exit__(self, *_: object) -> None:
        LoopGuard.active = None
        gc.callbacks.remove(self._on_gc)

    def check(self) -> None:
        """Raises `AssertionError` naming every callback that used more than `limit` seconds."""
        if self.slow:
            limit = f"{self.limit * 1e3:g} ms"
            raise AssertionError(f"blocked the event loop for more than {limit}:\n  " + "\n  ".join(self.slow))

    def run(self, callback: Any, args: tuple[Any, ...]) -> Any:
        """Run one callback and account for it. The loop's thread."""
        started = time.thread_time() - self._collector_time()
        try:
            return callback(*args)
        finally:
            spent = time.thread_time() - self._collector_time() - started
            self.calls += 1
            self.total += spent
            self.worst = max(self.worst, spent)
            if spent > self.limit:
                self.slow.append(f"{spent * 1e3:.1f} ms in {_describe(callback, args)}")

    def _collector_time(self) -> float:
        return self._gc_spent.get(threading.get_ident(), 0.0)

    def _on_gc(self, phase: str, _: dict[str, int]) -> None:
        # The collector runs in whichever thread allocates, and never in two at once.
        if phase == "start":
            self._gc_started = time.thread_time()
        else:
            key = threading.get_ident()
            self._gc_spent[key] = self._gc_spent.get(key, 0.0) + time.thread_time() - self._gc_started


class _Timed:
    """A callback that is run through the active guard, if there is one."""

    __slots__ = ("callback",)

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def __call__(self, *args: Any) -> Any:
        guard = LoopGuard.active
        return self.callback(*args) if guard is None else guard.run(self.callback, args)

    def __repr__(self) -> str:
        return repr(self.callback)


def _timed(callback: Any) -> Any:
    return callback if isinstance(callback, _Timed) or not callable(callback) else _Timed(callback)


@functools.cache
def guarded(base: type[Any]) -> type[Any]:
    """A subclass of an event loop class whose callbacks can be timed by a `LoopGuard`.

    It overrides the four methods through which every task step and every hand-over from another thread comes; that
    holds for uvloop as well, whose handles cannot be patched.
    """

    class Guarded(base):
        def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_soon(_timed(callback), *args, context=context)

        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_soon_threadsafe(_timed(callback), *args, context=context)

        def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_later(delay, _timed(callback), *args, context=context)

        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_at(when, _timed(callback), *args, context=context)

    Guarded.__name__ = Guarded.__qualname__ = base.__name__
    return Guarded


def _describe(callback: Any, args: tuple[Any, ...]) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"a step of {owner!r}"
    return f"{callback!r} with {len(args)} argument(s)"
