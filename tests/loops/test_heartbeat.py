"""The event loop stays responsive while the engine works.

The lag of a heartbeat is reported; it depends on the machine. What decides is the guard: no callback of the loop, task
steps included, may use more than 20 ms of the loop's own CPU time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from cbengine import AsyncEngine
from cbengine.testing import FakeModel, FakeTokenizer
from tests.adversity.census import Record
from tests.api.fakes import prompt, running
from tests.support.guard import LoopGuard
from tests.support.leaks import idle
from tests.support.loops import aio


class Heartbeat:
    """A task that wants to run every 10 ms, and what it got: `late` in seconds, one for each beat."""

    period = 0.010

    def __init__(self) -> None:
        self.late: list[float] = []

    @asynccontextmanager
    async def beating(self) -> AsyncGenerator[None]:
        task = asyncio.get_running_loop().create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + self.period
            await asyncio.sleep(self.period)
            self.late.append(time.monotonic() - due)

    def report(self, record: Record, guard: LoopGuard) -> None:
        """Put the figures into the test's report."""
        late = sorted(self.late)
        figures = {
            "beats": len(late),
            "lag_median_ms": round(late[len(late) // 2] * 1e3, 3),
            "lag_p99_ms": round(late[len(late) * 99 // 100] * 1e3, 3),
            "lag_worst_ms": round(late[-1] * 1e3, 3),
            "longest_callback_cpu_ms": round(guard.worst * 1e3, 3),
            "loop_cpu_ms": round(guard.total * 1e3, 1),
        }
        for name, value in figures.items():
            record(name, value)
        print(figures)


class SlowTokenizer(FakeTokenizer):
    """Computes for 50 ms at a long text: more than the guard lets anything on the loop have."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        end = time.thread_time() + (0.05 if len(text) > 4000 else 0.0)
        while time.thread_time() < end:
            pass
        return super().encode(text)


@aio
async def test_thirty_two_streams_and_a_long_text(
    loop_guard: LoopGuard, record_property: Record, loop_kind: str
) -> None:
    model = FakeModel(max_model_len=8192, delay=0.002)
    text = "The quick brown fox. " * 238 + "x"  # one token for each character
    heart = Heartbeat()
    settings = {"page_size": 16, "num_blocks": 1200, "max_batch_tokens": 512, "max_requests_per_batch": 64}
    async with running(model, tokenizer=SlowTokenizer(), **settings) as engine:
        async with heart.beating():
            streams = [engine.stream(prompt(20, n), max_new_tokens=60, ignore_eos=True) for n in range(32)]
            await streams[0].__anext__()
            long = engine.stream(text, max_new_tokens=20, ignore_eos=True)
            async with anyio.create_task_group() as group:
                for stream in [*streams, long]:
                    group.start_soon(_read, stream)
        assert long.usage.prompt_tokens == 4999
        assert all(len(stream.token_ids) == 60 for stream in streams)
    assert len(heart.late) >= 3
    heart.report(record_property, loop_guard)


async def _read(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


@aio("uvloop")
async def test_a_real_model_with_a_long_text(
    real_engine: AsyncEngine, loop_guard: LoopGuard, record_property: Record
) -> None:
    heart = Heartbeat()
    async with heart.beating():
        streams = [
            real_engine.stream(prompt(6, n), max_new_tokens=3, temperature=0, ignore_eos=True) for n in range(12)
        ]
        long = real_engine.stream("The quick brown fox jumps. " * 200, max_new_tokens=1)  # over a thousand tokens
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(_read, stream)
        long.cancel()
        await long.aclose()
        await idle(real_engine)
    heart.report(record_property, loop_guard)
