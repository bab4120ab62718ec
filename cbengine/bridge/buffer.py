"""What one stream has received so far. Touched by its own loop only; the engine thread holds it as an address."""

from __future__ import annotations

from collections.abc import Callable

from cbengine.bridge.ports import LoopPort, Waiter
from cbengine.outputs import FinishReason, RequestMetrics, RequestStatus, TokenLogprobs, Usage

_ALL = 1 << 60
"""More tokens than there are."""


class StreamBuffer:
    """Tokens, texts and arrival times of one answer, how it ended, and who waits for more.

    Kept as parallel lists: a `Token` is made when it is read, on the reader's side.
    """

    __slots__ = (
        "_acknowledged",
        "ack",
        "arrival_time",
        "cached_tokens",
        "error",
        "first_scheduled_time",
        "ids",
        "logprobs",
        "on_end",
        "port",
        "preemptions",
        "prompt_logprobs",
        "prompt_tokens",
        "read",
        "reason",
        "request_id",
        "scored",
        "status",
        "stride",
        "texts",
        "times",
        "waiters",
    )

    def __init__(self, port: LoopPort, request_id: str, prompt_tokens: int, arrival_time: float) -> None:
        self.port = port
        self.request_id = request_id
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.scored = False
        """The logprobs of the prompt were asked for."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []
        """One entry a token if the request asked for logprobs, else empty."""
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
        self.read = 0
        """Tokens that the reader has taken. Also looked at by the engine thread: one int, written here only."""
        self.ack: Callable[[], None] | None = None
        """Called each time that the reader has taken another `stride` tokens (backpressure "pause")."""
        self.stride = 1
        self._acknowledged = 0

    def want_all(self) -> None:
        """The reader waits for the whole answer: no token of it is one too many."""
        self.read = _ALL
        if self.ack is not None:
            self.ack()

    def advance(self, to: int) -> None:
        """The reader has taken the first `to` tokens."""
        self.read = max(self.read, to)
        # Every stride tokens, and not when the buffer seems to run low: the engine counts tokens that are still on their
        # way here. After it has held the request up with `stream_buffer` unread tokens, some acknowledgement always
        # leaves fewer than a stride, and so lets it go on.
        if self.ack is not None and to - self._acknowledged >= self.stride:
            self._acknowledged = to
            self.ack()

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
