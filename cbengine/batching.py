"""Many prompts at once, without a task for each: streams report their ends to one iterator."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from cbengine.bridge.ports import LoopPort
from cbengine.errors import QueueFullError, RequestError
from cbengine.outputs import Completion
from cbengine.prompts import Prompt
from cbengine.stream import TokenStream

MAX_OUTSTANDING = 1024
"""Most prompts of one batch that are under way, or answered and not yet taken: a batch may be without end."""

PORTION = 0.004
"""Seconds for which prompts are started in one go. A text takes up to a millisecond, and others share the loop."""

Ended = tuple[int, Completion | Exception]


class CompletionIterator:
    """Answers in the order in which they finish. Dropping it drops its streams, and so cancels what is unfinished.

    Prompts are started a portion at a time, the first ones when it is made and the others from the loop's own callbacks,
    so that others get their turn in between. Those that do not fit the queue's limits, or are more than
    `MAX_OUTSTANDING`, wait here, on the caller's side, until others have left. Several tasks of one loop may read it:
    each answer goes to one of them.
    """

    def __init__(
        self, prompts: Iterable[Prompt], start: Callable[[int, Prompt], TokenStream], port: Callable[[], LoopPort]
    ) -> None:
        if isinstance(prompts, str):
            raise TypeError("a batch is a sequence of prompts, got one text; use stream() or generate() for it")
        if not isinstance(prompts, Iterable):
            raise TypeError(f"a batch is a sequence of prompts, got {type(prompts).__name__}")
        self._total = len(prompts) if isinstance(prompts, Sized) else None  # for a progress bar
        self._todo: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
        self._next: tuple[int, Prompt] | None = None
        self._start = start
        self._get_port = port
        self._posted = False
        """`_go_on` is on its way."""
        self._live: dict[int, TokenStream] = {}
        self._ended: deque[Ended] = deque()
        self._broken: Exception | None = None
        """Why there are no further prompts; raised once what has come before is given out."""
        self._waiting: list[anyio.Event] = []
        self._advance()
        self._submit()
        self._raise_broken()

    def __aiter__(self) -> CompletionIterator:
        return self

    async def __anext__(self) -> Completion:
        _, outcome = await self._outcome()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                del outcome  # or the error, by its traceback, would keep this iterator from being dropped
        return outcome

    async def gather(self, progress: bool = False, return_exceptions: bool = False) -> list[Any]:
        """All answers in the order of the prompts."""
        outcomes: dict[int, Completion | Exception] = {}
        bar = _bar(progress, self._total)
        try:
            while True:
                try:
                    index, outcome = await self._outcome()
                except StopAsyncIteration:
                    return [outcomes[i] for i in range(len(outcomes))]
                if isinstance(outcome, Exception) and not return_exceptions:
                    raise outcome
                outcomes[index] = outcome
                bar(1)
        finally:
            bar(None)
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is unfinished, and wait until the engine has let go of it."""
        live = list(self._live.values())
        self._live.clear()
        self._ended.clear()
        self._todo, self._next, self._broken = iter(()), None, None
        self._wake()
        for stream in live:  # all at once, then wait for each
            stream.cancel()
        for stream in live:
            await stream.aclose()

    async def _outcome(self) -> Ended:
        await checkpoint()  # whatever is ready: a long batch must not keep the loop
        try:
            while True:
                full = self._submit()
                if self._ended:
                    return self._ended.popleft()
                self._raise_broken()
                if not self._live and self._next is None:
                    raise StopAsyncIteration
                await self._changed(full)
        finally:
            self._wake()  # what this one found, or took, may be the end for the others

    async def _changed(self, full: QueueFullError | None) -> None:
        """Wait for the end of an answer or of the batch; while the queue is full, no longer than it asks for."""
        news = anyio.Event()
        self._waiting.append(news)
        try:
            # The queue may be full of other people's requests, whose leaving nobody reports here.
            with anyio.move_on_after(full.retry_after if full is not None else None):
                await news.wait()
        finally:
            if news in self._waiting:
                self._waiting.remove(news)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            news.set()

    def _raise_broken(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            try:
                raise broken
            finally:
                del broken  # as in `__anext__`

    def _submit(self) -> QueueFullError | None:
        """Start as many prompts as are let in, for a while; the loop goes on with it."""
        until = time.perf_counter() + PORTION
        while self._next is not None and len(self._live) + len(self._ended) < MAX_OUTSTANDING and not self._posted:
            index, prompt = self._next
            try:
                stream = self._start(index, prompt)
            except QueueFullError as full:
                return full
            except RequestError as error:
                self._ended.append((index, error))
            except Exception as error:  # the engine takes no more
                self._broken = _without_us(error)
                return None
            else:
                self._live[index] = stream
                stream.when_ended(partial(_report, weakref.ref(self), index))
            self._advance()
            if time.perf_counter() > until:
                self._posted = self._get_port().post(_go_on, weakref.ref(self))
        return None

    def _advance(self) -> None:
        """The next prompt, or none. The caller's iterator may raise anything."""
        self._next = None  # first: what was started must not be started again
        try:
            self._next = next(self._todo, None)
        except Exception as error:
            self._broken = _without_us(error)

    def _finished(self, index: int) -> None:
        stream = self._live.pop(index, None)
        if stream is None:
            return
        self._ended.append((index, _outcome_of(stream)))
        self._wake()


def _outcome_of(stream: TokenStream) -> Completion | Exception:
    try:
        return stream.outcome()
    except Exception as error:
        return error


def _without_us(error: Exception) -> Exception:
    """The error without the frame that has just caught it, which refers to the iterator that is to keep the error."""
    traceback = error.__traceback__
    return error.with_traceback(None if traceback is None else traceback.tb_next)


def _report(ref: weakref.ref[CompletionIterator], index: int) -> None:
    # Weak: the engine holds the stream's buffer, and must not hold the iterator by it, or dropping it would not show.
    iterator = ref()
    if iterator is not None:
        iterator._finished(index)


def _go_on(ref: weakref.ref[CompletionIterator]) -> None:
    """The next portion. A callback of the loop; weak, as in `_report`."""
    iterator = ref()
    if iterator is not None:
        iterator._posted = False
        iterator._submit()
        if iterator._ended or not iterator._posted:
            iterator._wake()  # whoever waits: there is something for it, or a full queue to wait for, or no more to come


def _bar(progress: bool, total: int | None) -> Callable[[int | None], object]:
    """A progress bar: call with 1 for each answer, with None at the end. `total` is None where nobody knows it."""
    if not progress:
        return lambda step: None
    from tqdm.auto import tqdm

    bar = tqdm(desc="generating", unit=" answers", total=total)
    return lambda step: bar.close() if step is None else bar.update(step)
