"""Running coroutines on loops of every kind in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.loops import new_loop

Body = Callable[[], Coroutine[Any, Any, None]]


def run_on(kind: str, body: Body) -> None:
    """`asyncio.run` or `trio.run` of `body()` on a new loop of this kind, in the calling thread."""
    if kind == "trio":
        import trio

        trio.run(body)
    else:
        with asyncio.Runner(loop_factory=lambda: new_loop(kind)) as runner:
            runner.run(body())


class LoopThread:
    """A thread that runs `body()` on a loop of its own. `join` raises what it raised."""

    def __init__(self, kind: str, body: Body) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(kind, body), name=f"loop {kind}")
        self._thread.start()

    def _run(self, kind: str, body: Body) -> None:
        try:
            run_on(kind, body)
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the loop is still running"
        if self._error is not None:
            raise self._error
