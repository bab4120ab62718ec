"""One answer from the engine thread to one waiting coroutine (start, stop, pause)."""

from __future__ import annotations

from cbengine.bridge.ports import LoopPort, Waiter


class Reply:
    """Made and awaited on a loop, completed once from any thread."""

    def __init__(self, port: LoopPort) -> None:
        self._port = port
        self._waiter: Waiter | None = None
        self._done = False
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Complete it, with an error for the waiter if there is one. A loop that is gone does not mind."""
        self._port.post(self._complete, error)

    def _complete(self, error: BaseException | None) -> None:
        if not self._done:
            self._done, self._error = True, error
            if self._waiter is not None:
                self._waiter.wake()

    async def wait(self) -> None:
        """Wait for completion; raises the error that it was completed with. After a cancelled wait, wait again."""
        while not self._done:
            self._waiter = self._port.waiter()
            await self._waiter.wait()
        if self._error is not None:
            raise self._error
