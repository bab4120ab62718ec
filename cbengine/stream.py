"""The answer to one request, as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from cbengine.bridge.buffer import StreamBuffer
from cbengine.errors import StreamClosedError, StreamConsumedError, StreamError
from cbengine.outputs import Completion, FinishReason, RequestMetrics, RequestStatus, Token, Usage
from cbengine.text.answer_format import AnswerFormat
from cbengine.text.parts import Part
from cbengine.text.reasoning import AnswerParser

_CLOSE_TIMEOUT = 10.0
"""Seconds that `aclose` waits for the engine's word; the request is cancelled in any case."""

T_co = TypeVar("T_co", covariant=True)


class TokenStream:
    """Tokens of one request, in order, each once.

        async for token in engine.stream("Tell me a story"):
            print(token, end="", flush=True)

    Made by `AsyncEngine.stream` and `AsyncEngine.chat`, and used from the event loop that made it; `cancel` alone may be
    called from any thread. Leaving ends the work, whatever the way: a cancelled task, a `break` and the last reference
    gone, `aclose`, the end of an `async with` block, a timeout around it, the loop closing. The request's pages are back
    in the pool at the next step boundary. A class and no async generator, so that this does not wait for a garbage
    collector's hook.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_cancel",
        "_cancelled",
        "_closed",
        "_cursor",
        "_exhausted",
        "_form",
        "_index",
        "_left",
        "_reading",
    )

    def __init__(
        self, buffer: StreamBuffer, cancel: Callable[[], None], index: int = 0, form: AnswerFormat | None = None
    ) -> None:
        self._buffer = buffer
        self._cancel = cancel
        self._index = index
        self._form = form
        self._cursor = 0
        self._left = False  # cancel() was called, or the reader has gone
        self._cancelled = False  # and the answer had not ended by then, as far as was known here
        self._closed = False  # aclose() was called
        self._reading = False
        self._exhausted = False

    # --- reading ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> TokenStream:
        if self._exhausted:
            raise StreamConsumedError(
                f"stream {self.request_id!r} has been read to its end; its tokens are delivered once. The whole answer is "
                "in `await stream.result()`",
                request_id=self.request_id,
            )
        self._check_loop()
        return self

    async def __anext__(self) -> Token:
        await self._more()
        return self._next_ready()

    async def _more(self) -> None:
        """Return once there is an unread token; raise `StopAsyncIteration`, or the request's error, at the end."""
        buffer = self._buffer
        while self._cursor >= len(buffer.ids) or self._left:
            if self._left or buffer.reason is not None:
                self._finish()
            self._claim()
            try:
                await buffer.changed()
            except BaseException:
                # The reading task was cancelled, or a timeout around it fired: the reader has left. Never swallowed.
                self.cancel()
                raise
            finally:
                self._reading = False

    def _claim(self) -> None:
        if self._reading:
            raise StreamConsumedError(
                f"stream {self.request_id!r} is being read by another task; one reader at a time",
                request_id=self.request_id,
            )
        self._check_loop()
        self._reading = True

    def _check_loop(self) -> None:
        if not self._buffer.port.is_current():
            raise StreamError(
                f"stream {self.request_id!r} belongs to another event loop; read it in the loop that made it",
                request_id=self.request_id,
            )

    def _finish(self) -> None:
        first, self._exhausted = not self._exhausted, True
        error = self._buffer.error
        if error is not None and first and not self._left:
            raise error
        raise StopAsyncIteration

    def _token(self, at: int) -> Token:
        buffer = self._buffer
        last = buffer.reason in (FinishReason.STOP, FinishReason.LENGTH) and at == len(buffer.ids) - 1
        reason = buffer.reason if last else None
        if not buffer.logprobs:
            return Token(buffer.texts[at], buffer.ids[at], at, finish_reason=reason)
        report = buffer.logprobs[at]
        return Token(buffer.texts[at], buffer.ids[at], at, report.logprob, report.top, reason)

    def text(self) -> StreamView[str]:
        """The same, as text: `async for piece in stream.text()`. Tokens without text are passed over."""
        return StreamView(self, self._next_text)

    def chunks(self) -> StreamView[str]:
        """Everything that is ready, joined, each time: for web sockets and slow readers. Never an empty string."""
        return StreamView(self, self._next_chunk)

    def parts(self) -> StreamView[Part]:
        """An answer in a chat as it comes, its text, reasoning and tool calls told apart (see `AsyncEngine.chat`).

        Only what may still be a mark is held back. Of any other stream, all is text.
        """
        form = self._form or AnswerFormat()
        return StreamView(self, _PartReader(self, form.parser()).next)

    async def _next_text(self) -> str:
        while True:
            token = await self.__anext__()
            if token.text:
                return token.text

    async def _next_chunk(self) -> str:
        while True:
            await self._more()
            start, self._cursor = self._cursor, len(self._buffer.ids)
            self._buffer.advance(self._cursor)
            chunk = "".join(self._buffer.texts[start:])
            if chunk:
                return chunk

    async def result(self) -> Completion:
        """Wait for the end and return the whole answer, what was already read included. May be called at any time.

        Raises:
            StreamClosedError: the stream was closed before the answer was complete.
            RequestTimeoutError, RequestFailedError, EngineStoppedError, EngineDeadError: the request ended that way.
        """
        buffer = self._buffer
        self._want_all()
        while buffer.reason is None and not self._left:
            self._check_loop()
            try:
                await buffer.changed()
            except BaseException:
                self.cancel()
                raise
        return self.outcome()

    def outcome(self) -> Completion:
        """What `result` returns or raises, for an answer that has ended.

        Raises:
            StreamError: it has not ended yet. And what `result` raises.
        """
        buffer = self._buffer
        reason = self.finish_reason
        if self._closed and reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise StreamClosedError(
                f"stream {self.request_id!r} was closed before its answer was complete", request_id=self.request_id
            )
        if buffer.error is not None and not self._left:
            raise buffer.error
        if reason is None:
            raise StreamError(
                f"stream {self.request_id!r} has not ended yet; await result()", request_id=self.request_id
            )
        return Completion(
            request_id=buffer.request_id,
            text=self.text_so_far,
            token_ids=tuple(buffer.ids),
            finish_reason=reason,
            usage=self.usage,
            metrics=self.metrics,
            index=self._index,
            parts=() if self._form is None else self._form.parse(self.text_so_far),
            prompt_logprobs=(None, *buffer.prompt_logprobs) if buffer.scored else None,
            logprobs=tuple(report.logprob for report in buffer.logprobs) if buffer.logprobs else None,
            top_logprobs=tuple(report.top for report in buffer.logprobs) if buffer.logprobs else None,
        )

    @property
    def choices(self) -> tuple[TokenStream, ...]:
        """The streams of the `n` answers; this one alone unless `n > 1`."""
        return (self,)

    # What a stream of several answers asks of its parts (`choices.py`).

    @property
    def _ended(self) -> bool:
        return self._buffer.reason is not None or self._left

    @property
    def _has_unread(self) -> bool:
        return self._cursor < len(self._buffer.ids) and not self._left

    @property
    def _ready_since(self) -> float:
        return self._buffer.times[self._cursor]

    def _want_all(self) -> None:
        if self._buffer.reason is None:
            self._buffer.want_all()

    def _next_ready(self) -> Token:
        at = self._cursor
        self._cursor = at + 1
        self._buffer.advance(at + 1)
        return self._token(at)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once the answer has ended: on the stream's own loop, at once if it has ended already.

        Like `result`, this is waiting for all of it: backpressure does not hold the request up any more.
        """
        self._want_all()
        if self._buffer.reason is not None:
            callback()
        else:
            self._buffer.on_end = callback

    # --- leaving ---------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the work. Any thread, any number of times. The iteration ends; what has come so far stays readable."""
        if not self._left:
            self._left = True
            if self._buffer.reason is None:
                self._cancelled = True
                self._cancel()
                self._buffer.port.post(self._buffer.wake)

    async def aclose(self) -> None:
        """End the work, and wait (shielded from cancellation, ten seconds at most) until the engine has let go of it.

        Raises:
            StreamError: this is another loop than the stream's. The work is ended all the same.
        """
        self._closed = True
        if self._buffer.reason is not None:
            return
        self.cancel()
        self._check_loop()
        with anyio.move_on_after(_CLOSE_TIMEOUT, shield=True):
            while self._buffer.reason is None and not self._buffer.port.closed:
                await self._buffer.changed()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Nobody can read this any more. Only a queue's put, so it is safe wherever the collector runs.
        try:
            if not self._left and self._buffer.reason is None:
                self._cancel()
        except AttributeError:  # __init__ did not get that far
            pass

    # --- looking ---------------------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """The label given to `stream`, or one made for it."""
        return self._buffer.request_id

    @property
    def status(self) -> RequestStatus:
        """As last heard from the engine."""
        return self._buffer.status

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the answer is being made. `cancelled` for good as soon as `cancel` was called on an answer whose end
        had not come yet, even if that end was on its way."""
        return FinishReason.CANCELLED if self._cancelled else self._buffer.reason

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._buffer.usage

    @property
    def metrics(self) -> RequestMetrics:
        """Timings so far."""
        return self._buffer.metrics

    @property
    def text_so_far(self) -> str:
        """All text that has come, read or not. Stays readable however the stream ended."""
        return "".join(self._buffer.texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids that have come, read or not."""
        return tuple(self._buffer.ids)

    def __repr__(self) -> str:
        return f"<TokenStream {self.request_id!r} {self.status.value}, {len(self._buffer.ids)} tokens>"


class _PartReader:
    """Reads a stream through a parser."""

    def __init__(self, stream: TokenStream, parser: AnswerParser) -> None:
        self._stream = stream
        self._parser: AnswerParser | None = parser
        self._ready: deque[Part] = deque()

    async def next(self) -> Part:
        while not self._ready:
            if self._parser is None:
                raise StopAsyncIteration
            try:
                token = await self._stream.__anext__()
            except StopAsyncIteration:
                self._ready.extend(self._parser.flush())
                self._parser = None
            else:
                self._ready.extend(self._parser.push(token.text))
        return self._ready.popleft()


class StreamView(Generic[T_co]):
    """A stream read in another unit. It holds the stream, so dropping the view is leaving the stream."""

    __slots__ = ("_next", "_stream")

    def __init__(self, stream: TokenStream, read: Callable[[], object]) -> None:
        self._stream = stream
        self._next = read

    def __aiter__(self) -> StreamView[T_co]:
        self._stream.__aiter__()
        return self

    async def __anext__(self) -> T_co:
        return await self._next()  # type: ignore[misc]
