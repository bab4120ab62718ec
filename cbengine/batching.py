"""Many prompts at once, without a task for each: streams report their ends to one iterator."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any

import anyio

from cbengine.errors import QueueFullError, RequestError
from cbengine.outputs import Completion
from cbengine.prompts import Prompt
from cbengine.stream import TokenStream

Ended = tuple[int, Completion | Exception]


class CompletionIterator:
    """Answers in the order in which they finish. Dropping it drops its streams, and so cancels what is unfinished.

    Prompts that do not fit the queue's limits wait here, on the caller's side, until others have left the queue.
    """

    def __init__(self, prompts: Iterable[Prompt], start: Callable[[int, Prompt], TokenStream]) -> None:
        if isinstance(prompts, str):
            raise TypeError("a batch is a sequence of prompts, got one text; use stream() or generate() for it")
        self._total = len(prompts) if isinstance(prompts, Sized) else None  # for a progress bar
        self._todo: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
        self._next: tuple[int, Prompt] | None = next(self._todo, None)
        self._start = start
        self._live: dict[int, TokenStream] = {}
        self._ended: deque[Ended] = deque()
        self._news: anyio.Event | None = None
        self._submit()

    def __aiter__(self) -> CompletionIterator:
        return self

    async def __anext__(self) -> Completion:
        _, outcome = await self._outcome()
        if isinstance(outcome, Exception):
            raise outcome
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
        self._next = None
        for stream in live:  # all at once, then wait for each
            stream.cancel()
        for stream in live:
            await stream.aclose()

    async def _outcome(self) -> Ended:
        while not self._ended:
            full = self._submit()
            if self._ended:
                break
            if not self._live and self._next is None:
                raise StopAsyncIteration
            self._news = anyio.Event()
            if full is not None:
                # The queue may be full of other people's requests, whose leaving nobody reports here.
                with anyio.move_on_after(full.retry_after):
                    await self._news.wait()
            else:
                await self._news.wait()
        index, outcome = self._ended.popleft()
        return index, outcome

    def _submit(self) -> QueueFullError | None:
        """Start as many prompts as are let in."""
        while self._next is not None:
            index, prompt = self._next
            try:
                stream = self._start(index, prompt)
            except QueueFullError as full:
                return full
            except RequestError as error:
                self._ended.append((index, error))
            else:
                self._live[index] = stream
                stream.when_ended(partial(_report, weakref.ref(self), index))
            self._next = next(self._todo, None)
        return None

    def _finished(self, index: int) -> None:
        stream = self._live.pop(index, None)
        if stream is None:
            return
        try:
            outcome: Completion | Exception = stream.outcome()
        except Exception as error:
            outcome = error
        self._ended.append((index, outcome))
        if self._news is not None:
            self._news.set()


def _report(ref: weakref.ref[CompletionIterator], index: int) -> None:
    # Weak: the engine holds the stream's buffer, and must not hold the iterator by it, or dropping it would not show.
    iterator = ref()
    if iterator is not None:
        iterator._finished(index)


def _bar(progress: bool, total: int | None) -> Callable[[int | None], object]:
    """A progress bar: call with 1 for each answer, with None at the end. `total` is None where nobody knows it."""
    if not progress:
        return lambda step: None
    from tqdm.auto import tqdm

    bar = tqdm(desc="generating", unit=" answers", total=total)
    return lambda step: bar.close() if step is None else bar.update(step)
