"""The clients of a benchmark: one coroutine for each request, reading the engine's public stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cbengine.cli.measures import Record
from cbengine.cli.workload import Item, Workload
from cbengine.engine import AsyncEngine

Progress = Callable[[int], object]
"""Called with the number of tokens that have just come."""


async def ask(engine: AsyncEngine, workload: Workload, progress: Progress | None = None) -> list[Record]:
    """Send every request when it is due and read its tokens one by one; returns the records in the workload's order.

    Raises whatever a request raises, once the others have been cancelled.
    """
    records = [Record() for _ in workload.items]
    late = _Late(workload, records)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for item, record in zip(workload.items, records, strict=True):
            tasks.create_task(_client(engine, item, record, start, late, progress))
    return records


async def _client(
    engine: AsyncEngine, item: Item, record: Record, start: float, late: _Late, progress: Progress | None
) -> None:
    if item.after_tokens:
        await late.due.wait()
        record.submit = time.perf_counter()
    else:
        record.submit = start + item.arrival_s  # a busy loop may wake us later
        await asyncio.sleep(max(0.0, record.submit - time.perf_counter()))
    stream = engine.stream(list(item.prompt), temperature=0, max_new_tokens=item.max_new_tokens, ignore_eos=True)
    async for token in stream:
        record.times.append(time.perf_counter())
        record.ids.append(token.id)
        if not item.after_tokens and len(record.ids) == late.tokens:
            late.one_more()
        if progress is not None:
            progress(1)


class _Late:
    """Tells the late requests of a workload that all others have as many tokens as they wait for."""

    def __init__(self, workload: Workload, records: list[Record]) -> None:
        wanted = [item.after_tokens for item in workload.items if item.after_tokens]
        self.tokens = max(wanted, default=0)
        self.due = asyncio.Event()
        self._missing = len(records) - len(wanted)

    def one_more(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.due.set()


async def warm_up(engine: AsyncEngine, workload: Workload) -> None:
    """Two short requests: whatever is made at first use is made, and nothing of the workload gets into the prefix cache."""
    prompt = [*list(workload.items[0].prompt[:8]), workload.items[-1].prompt[-1]]
    for _ in range(2):
        await engine.generate(prompt, temperature=0, max_new_tokens=4, ignore_eos=True)


async def steps_to_free(engine: AsyncEngine, workload: Workload, times: int = 3) -> int | None:
    """Most steps that were launched from `cancel()` until the pages of a request were free again, with nothing else
    running. None if the model takes no request that is long enough."""
    worst = None
    for number in range(times):
        stream = engine.stream(
            list(workload.items[number % len(workload.items)].prompt), temperature=0, ignore_eos=True
        )
        async for token in stream:
            if token.index >= 4:
                break
        steps = engine.stats().steps
        stream.cancel()
        while engine.stats().rows_used:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)
        if stream.finish_reason == "cancelled":
            worst = max(worst or 0, engine.stats().steps - steps)
        await stream.aclose()
    return worst
