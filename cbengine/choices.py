"""Several answers to one prompt (`n > 1`), read as one stream or one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from cbengine.errors import CBEngineError, StreamError
from cbengine.outputs import Completion, FinishReason, RequestMetrics, RequestStatus, Token, Usage
from cbengine.stream import StreamView, TokenStream
from cbengine.text.parts import Part


def _nothing() -> None:
    pass


class ChoicesStream(TokenStream):
    """The tokens of `n` answers, in the order in which they were made; `token.choice` tells whose.

    `choices` are the answers' own streams, for whoever wants to read them apart: a token is delivered once, there or here.
    What there is one of in a stream (text, ids, status, metrics) is that of the first answer here; `usage` counts all.
    `request_id` is `label`; the answers' own streams have labels made from it.
    """

    __slots__ = ("_children", "_label")

    def __init__(self, children: Sequence[TokenStream], label: str, index: int = 0) -> None:
        # Not self.cancel: a stream that refers to itself would not go when its last reference does.
        super().__init__(children[0]._buffer, _nothing, index)
        self._children = tuple(children)
        self._label = label

    @property
    def request_id(self) -> str:
        return self._label

    @property
    def choices(self) -> tuple[TokenStream, ...]:
        return self._children

    async def __anext__(self) -> Token:
        while True:
            child = self._readiest()
            if child is not None:
                choice, stream = child
                return replace(stream._next_ready(), choice=choice)
            if self._left or all(stream._ended for stream in self._children):
                self._finish()
            await self._wait_for(lambda: self._readiest() is not None or all(s._ended for s in self._children))

    def _readiest(self) -> tuple[int, TokenStream] | None:
        """The answer whose next unread token came first; of those that came together, the first answer."""
        ready = [(stream._ready_since, i) for i, stream in enumerate(self._children) if stream._has_unread]
        if not ready or self._left:
            return None
        _, i = min(ready)
        return i, self._children[i]

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something comes for any of the answers."""
        self._claim()
        waiter = self._buffer.port.waiter()
        buffers = [stream._buffer for stream in self._children]
        for buffer in buffers:
            buffer.waiters.append(waiter)
        try:
            if not condition() and not self._left:
                await waiter.wait()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._reading = False
            for buffer in buffers:
                if waiter in buffer.waiters:
                    buffer.waiters.remove(waiter)

    def _finish(self) -> NoReturn:
        first, self._exhausted = not self._exhausted, True
        errors = [stream._buffer.error for stream in self._children if stream._buffer.error is not None]
        if errors and first and not self._left:
            raise errors[0]
        raise StopAsyncIteration

    def text(self) -> StreamView[str]:
        raise StreamError("the texts of several answers would be mixed; read `stream.choices[i].text()`, or the tokens")

    def parts(self) -> StreamView[Part]:
        raise StreamError(
            "the parts of several answers would be mixed; read `stream.choices[i].parts()`, or the tokens"
        )

    def chunks(self) -> StreamView[str]:
        raise StreamError(
            "the texts of several answers would be mixed; read `stream.choices[i].chunks()`, or the tokens"
        )

    def _want_all(self) -> None:
        for stream in self._children:
            stream._want_all()

    async def result(self) -> Completion:
        self._want_all()
        try:
            for stream in self._children:
                await stream.result()
        except CBEngineError:
            raise  # an answer that failed, or the wrong loop: nobody has left
        except BaseException:
            self.cancel()
            raise
        return self.outcome()

    def outcome(self) -> Completion:
        completions = tuple(replace(stream.outcome(), choice=i) for i, stream in enumerate(self._children))
        first = completions[0]
        return replace(first, request_id=self._label, index=self._index, usage=self.usage, choices=completions)

    def when_ended(self, callback: Callable[[], None]) -> None:
        left = len(self._children)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                callback()

        for stream in self._children:
            stream.when_ended(one_ended)

    def cancel(self) -> None:
        self._left = True
        for stream in self._children:
            stream.cancel()

    async def aclose(self) -> None:
        self.cancel()
        self._closed = True
        for stream in self._children:
            await stream.aclose()

    def __del__(self) -> None:
        pass  # the children look after themselves

    @property
    def finish_reason(self) -> FinishReason | None:
        """That of the first answer, once all have ended."""
        if all(stream.finish_reason is not None for stream in self._children):
            return self._children[0].finish_reason
        return None

    @property
    def status(self) -> RequestStatus:
        return self._children[0].status

    @property
    def usage(self) -> Usage:
        """The prompt once, and the tokens of all answers."""
        first = self._children[0].usage
        return replace(first, completion_tokens=sum(s.usage.completion_tokens for s in self._children))

    @property
    def metrics(self) -> RequestMetrics:
        return self._children[0].metrics
