"""Nothing may be left over: threads, and what an engine holds for requests that have ended.

`leak_check` in `tests/conftest.py` calls `find_leaks` after every test. An engine fixture that lives longer than a test
registers itself, so that each test has to leave it idle:

    with watched("shared engine", lambda: busy_fields(engine)): yield engine
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

THREAD_PREFIX = "cbengine-"
"""Every thread that cbengine starts has a name that begins like this."""

IDLE_FIELDS = ("running", "waiting", "pages_used", "rows_used", "labels")
"""Fields of `engine.stats()` that are 0 when no request is alive."""

_hooks: dict[str, Callable[[], list[str]]] = {}


@contextlib.contextmanager
def watched(name: str, find: Callable[[], list[str]]) -> Iterator[None]:
    """While this is open, `find()` is asked after every test for descriptions of what is left over."""
    assert name not in _hooks, f"{name} is watched already"
    _hooks[name] = find
    try:
        yield
    finally:
        del _hooks[name]


def engine_threads() -> set[threading.Thread]:
    """The living threads of cbengine."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)}


def busy_fields(engine: Any) -> list[str]:
    """What `engine.stats()` says is still held, as "field=value"; empty for an idle engine."""
    stats = engine.stats()
    return [f"{name}={getattr(stats, name)}" for name in IDLE_FIELDS if getattr(stats, name) != 0]


def find_leaks(threads_before: set[threading.Thread], *, timeout: float = 3.0) -> list[str]:
    """Descriptions of everything that does not go away by itself within `timeout` seconds."""

    def now() -> list[str]:
        found = [f"thread {thread.name} is alive" for thread in engine_threads() - threads_before]
        for name, find in _hooks.items():
            found += [f"{name}: {what}" for what in find()]
        return found

    return _settled(now, timeout)


def assert_idle(engine: Any, *, timeout: float = 5.0) -> None:
    """Wait until the engine holds nothing. Blocks: not for use on an event loop (there: `await idle(engine)`).

    Raises:
        AssertionError: it still holds pages, rows, labels or requests after `timeout` seconds.
    """
    left = _settled(lambda: busy_fields(engine), timeout)
    assert not left, f"the engine is not idle: {', '.join(left)}"


async def idle(engine: Any, *, timeout: float = 5.0) -> None:
    """`assert_idle` for coroutines, on any loop."""
    import anyio

    deadline = time.monotonic() + timeout
    while left := busy_fields(engine):
        assert time.monotonic() < deadline, f"the engine is not idle: {', '.join(left)}"
        await anyio.sleep(0.002)


def _settled(find: Callable[[], list[str]], timeout: float) -> list[str]:
    """The result of `find()` once it is empty, or the last one at the deadline."""
    deadline = time.monotonic() + timeout
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found
