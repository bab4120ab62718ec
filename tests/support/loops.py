"""Run a coroutine test on every event loop, and let nothing that a loop complains about pass unseen.

    from tests.support.loops import aio

    @aio                                  # asyncio, asyncio + uvloop, asyncio with eager tasks (Python 3.12+)
    async def test_x(smollm2): ...

    @aio(trio=True)                       # the same and trio
    @aio("asyncio")                       # this one only
    @aio(timeout=20, guard=False)         # another limit than 60 s; without the guard against blocking calls

Fixtures work as in any test; `loop_kind` is one of them. `tests/conftest.py` does the rest through `run_test`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
import sys
from asyncio import constants
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.support.guard import BlockingCalls, guarded

aio = pytest.mark.aio

TestBody = Callable[[], Coroutine[Any, Any, None]]

ASYNCIO_KINDS = ("asyncio", "uvloop", "eager") if sys.version_info >= (3, 12) else ("asyncio", "uvloop")
"""The asyncio loops that this Python has. Eager tasks came with Python 3.12."""

ALL_KINDS = (*ASYNCIO_KINDS, "trio")


class LoopFault(AssertionError):
    """The test's own code passed, but its loop reported an error, or something was left running on it."""


def kinds_of(marker: pytest.Mark) -> tuple[str, ...]:
    """The loops that an `aio` marker asks for."""
    kinds = marker.args or (ALL_KINDS if marker.kwargs.get("trio") else ASYNCIO_KINDS)
    unknown = set(kinds) - {*ALL_KINDS, "eager"}
    if unknown:
        raise pytest.UsageError(f"aio: unknown loop {', '.join(sorted(unknown))}; known are {', '.join(ALL_KINDS)}")
    return tuple(kind for kind in kinds if kind in ALL_KINDS)


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """A new asyncio loop of this kind. Its callbacks are timed while a `LoopGuard` is active (see `guard.py`)."""
    if kind == "uvloop":
        import uvloop

        return guarded(uvloop.Loop)()
    loop = guarded(asyncio.SelectorEventLoop)()
    if kind == "eager":
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    return loop


def run_test(kind: str, body: TestBody, *, timeout: float = 60.0, guard: bool = True) -> None:
    """Run `body()` on a new loop of this kind, in debug mode.

    Raises:
        LoopFault: the loop's exception handler was called (an exception that nobody retrieved, a callback that raised),
            or a task outlived the test.
        TimeoutError: it took longer than `timeout` seconds.
    """
    if kind == "trio":
        _run_trio(body, timeout)
    else:
        _run_asyncio(kind, body, timeout, guard)


def _run_trio(body: TestBody, timeout: float) -> None:
    import trio

    async def main() -> None:
        with trio.fail_after(timeout):
            await body()

    try:
        trio.run(main, strict_exception_groups=True)
    except trio.TooSlowError as slow:
        raise TimeoutError(f"the test took longer than {timeout:g} s") from slow


def _run_asyncio(kind: str, body: TestBody, timeout: float, guard: bool) -> None:
    faults: list[dict[str, Any]] = []
    leftovers: list[str] = []

    async def main() -> None:
        before = asyncio.all_tasks()  # this very task
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                await body()
        except TimeoutError as slow:
            if limit.expired():
                raise TimeoutError(f"the test took longer than {timeout:g} s") from slow
            raise
        finally:
            leftovers.extend(await _tasks_left(before))

    runner = asyncio.Runner(debug=True, loop_factory=lambda: new_loop(kind))
    with _young_objects_only(), _short_stacks(), runner:
        loop = runner.get_loop()
        # Debug mode logs each callback above this many seconds of wall time. That blames the machine, so it is off;
        # the LoopGuard counts the loop's own CPU time.
        loop.slow_callback_duration = 3600.0
        loop.set_exception_handler(lambda _, context: faults.append(context))
        with BlockingCalls() if guard else contextlib.nullcontext():
            runner.run(main())
        # Dropped tasks and futures report "exception was never retrieved" when they are collected.
        gc.collect()
    if leftovers:
        raise LoopFault("still running after the test:\n  " + "\n  ".join(leftovers))
    if faults:
        causes = [c["exception"] for c in faults if isinstance(c.get("exception"), Exception)]
        fault = LoopFault("the loop reported:\n  " + "\n  ".join(_describe(c) for c in faults))
        raise fault from (ExceptionGroup("reported by the loop", causes) if causes else None)


@contextlib.contextmanager
def _young_objects_only() -> Iterator[None]:
    """Inside, `gc.collect()` looks at objects made inside: cheap, and nothing older is blamed on this test."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _short_stacks() -> Iterator[None]:
    """Inside, debug mode notes for each callback and future where it was made, not the whole stack, and does not look on
    the disk whether its files have changed: a third of the time that a test takes, for something to read only."""
    settings: Any = constants
    depth, look = settings.DEBUG_STACK_DEPTH, linecache.checkcache
    settings.DEBUG_STACK_DEPTH = 2
    linecache.checkcache = lambda filename=None: None
    try:
        yield
    finally:
        settings.DEBUG_STACK_DEPTH, linecache.checkcache = depth, look


async def _tasks_left(before: set[asyncio.Task[Any]]) -> list[str]:
    """Tasks that do not end by themselves within a few turns of the loop, as text."""
    turns = 20
    while (left := asyncio.all_tasks() - before) and turns:
        await asyncio.sleep(0.005)
        turns -= 1
    return [repr(task) for task in left]


def _describe(context: dict[str, Any]) -> str:
    details = ", ".join(f"{key}={value!r}" for key, value in context.items() if key not in ("message", "exception"))
    return f"{context.get('message')}: {context.get('exception')!r} ({details})"


async def eventually(condition: Callable[[], bool], *, timeout: float = 5.0, what: str = "the condition") -> None:
    """Wait, on any loop, until `condition()` is true. Raises `AssertionError` after `timeout` seconds."""
    import anyio

    with anyio.move_on_after(timeout):
        while not condition():
            await anyio.sleep(0.002)
        return
    raise AssertionError(f"{what} did not come true within {timeout:g} s")
