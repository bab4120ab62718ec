"""Where the engine thread reaches an event loop: asyncio (uvloop included) or trio."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import anyio
from anyio.lowlevel import current_token

from cbengine.errors import StreamError


class Waiter(Protocol):
    """One task's wait for one wake-up. Both methods on the loop's own thread."""

    def wake(self) -> None: ...

    async def wait(self) -> None: ...


class LoopPort(ABC):
    """One event loop. `post` is the only member that may be used from other threads."""

    def __init__(self, token: object) -> None:
        self.token = token
        self.closed = False
        """Set once a post found the loop closed."""

    def post(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Run `fn(*args)` on the loop soon. False if the loop is closed. Any thread."""
        try:
            self._schedule(fn, *args)
        except RuntimeError:  # asyncio: "Event loop is closed"; trio.RunFinishedError is a RuntimeError too
            self.closed = True
            return False
        return True

    @property
    def is_gone(self) -> bool:
        """The loop is known to be closed. Any thread."""
        return self.closed

    def is_current(self) -> bool:
        """True in a coroutine of this loop."""
        try:
            return current_token().native_token is self.token
        except RuntimeError:
            return False

    @abstractmethod
    def _schedule(self, fn: Callable[..., Any], *args: Any) -> None: ...

    @abstractmethod
    def waiter(self) -> Waiter:
        """A fresh waiter. On the loop's thread."""


class _AsyncioWaiter:
    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future = loop.create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        await self._future


class _AsyncioPort(LoopPort):
    token: asyncio.AbstractEventLoop

    @property
    def is_gone(self) -> bool:
        return self.closed or self.token.is_closed()

    def is_current(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.token
        except RuntimeError:
            return False

    def _schedule(self, fn: Callable[..., Any], *args: Any) -> None:
        self.token.call_soon_threadsafe(fn, *args)

    def waiter(self) -> Waiter:
        return _AsyncioWaiter(self.token)


class _EventWaiter:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


class _TrioPort(LoopPort):
    def _schedule(self, fn: Callable[..., Any], *args: Any) -> None:
        self.token.run_sync_soon(fn, *args)  # type: ignore[attr-defined]

    def waiter(self) -> Waiter:
        return _EventWaiter()


def _running_loop() -> object:
    """The loop of this thread. Raises `RuntimeError` if none is running."""
    try:
        return current_token().native_token
    except RuntimeError:
        return asyncio.get_running_loop()  # in a callback, which runs in no task: anyio sees asyncio in tasks only


class Ports:
    """The loops that one engine is used from.

    A port lives as long as something that was made on its loop does (a stream, a reply): a loop that has ended is not kept,
    whatever its kind, and trio does not say that it has.
    """

    def __init__(self) -> None:
        self._ports: weakref.WeakValueDictionary[object, LoopPort] = weakref.WeakValueDictionary()

    def current(self) -> LoopPort:
        """The port of the loop that is running in this thread. Raises `StreamError` outside of one."""
        try:
            token = _running_loop()
        except RuntimeError:
            raise StreamError(
                "no event loop is running in this thread: streams are made and read inside a coroutine (asyncio or trio)"
            ) from None
        port = self._ports.get(token)
        if port is None:
            kind = _AsyncioPort if isinstance(token, asyncio.AbstractEventLoop) else _TrioPort
            port = kind(token)
            self._ports[token] = port  # no race: only a loop's own thread adds it
        return port
