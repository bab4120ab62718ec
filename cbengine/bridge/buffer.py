"""What one stream has received so far. Touched by its own loop only; the engine thread holds it as an address."""

from __future__ import annotations

from collections.abc import Callable

from cbengine.bridge.ports import LoopPort, Waiter
from cbengine.outputs import FinishReason, RequestMetrics, RequestStatus, Usage


class StreamBuffer:
    """Tokens, texts and arrival times of one answer, how it ended, and who waits for more.

    Kept as parallel lists: a `Token` is made when it is read, on the reader's side.
    """

    __slots__ = (
        "arrival_time",
        "cached_tokens",
        "error",
        "first_scheduled_time",
        "ids",
        "on_end",
        "port",
        "preemptions",
        "prompt_tokens",
        "reason",
        "request_id",
        "status",
        "texts",
        "times",
        "waiters",
    )

    def __init__(self, port: LoopPort, request_id: str, prompt_tokens: int, arrival_time: float) -> None:
        self.port = port
        self.request_id = request_id
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.times: list[float] = []
        self.status = RequestStatus.PENDING
        self.reason: FinishReason | None = None
        """Set by the terminal event, exactly once."""
        self.error: BaseException | None = None
        self.waiters: list[Waiter] = []
        self.on_end: Callable[[], None] | None = None
        self.prompt_tokens = prompt_tokens
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0

    def wake(self) -> None:
        """Wake everybody who waits for news."""
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                waiter.wake()

    async def changed(self) -> None:
        """Wait for the next token or the end."""
        waiter = self.port.waiter()
        self.waiters.append(waiter)
        try:
            await waiter.wait()
        finally:
            # A cancelled wait leaves its waiter behind, unless the wake-up came first.
            if waiter in self.waiters:
                self.waiters.remove(waiter)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, len(self.ids), self.cached_tokens)

    @property
    def metrics(self) -> RequestMetrics:
        times = self.times
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=times[0] if times else None,
            last_token_time=times[-1] if times else None,
            token_times=tuple(times),
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )
