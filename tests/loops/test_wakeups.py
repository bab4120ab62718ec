"""Outputs of one step reach one loop by one wake-up, however many streams it has."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from cbengine.testing import FakeModel
from tests.api.fakes import fake_engine, prompt, running
from tests.loops.runs import LoopThread
from tests.support.leaks import assert_idle
from tests.support.loops import aio

STREAMS, NEW = 32, 40


@aio(trio=True)
async def test_one_wakeup_for_each_step() -> None:
    async with running(max_batch_tokens=256, max_requests_per_batch=STREAMS, num_blocks=600) as engine:
        async with engine.paused():
            streams = [engine.stream(prompt(4, n), max_new_tokens=NEW, ignore_eos=True) for n in range(STREAMS)]
        before = engine.stats()
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(stream.result)
        after = engine.stats()
        steps, wakeups = after.steps - before.steps, after.loop_wakeups - before.loop_wakeups
        assert steps == NEW  # all of them begin together, and none asks for more
        assert NEW <= wakeups <= NEW + 2  # and two for the news that they have begun to be computed
        assert after.generated_tokens == STREAMS * NEW


@pytest.mark.parametrize("loops", [2, 4])
def test_one_wakeup_for_each_step_and_loop(loops: int) -> None:
    engine = fake_engine(FakeModel(), max_batch_tokens=256, max_requests_per_batch=64, num_blocks=600)
    asyncio.run(engine.start())
    asyncio.run(engine.pause())
    asked = threading.Barrier(loops + 1)

    async def body() -> None:
        streams = [engine.stream(prompt(4, n), max_new_tokens=NEW, ignore_eos=True) for n in range(8)]
        await anyio.to_thread.run_sync(asked.wait)
        for stream in streams:
            assert len((await stream.result()).token_ids) == NEW

    threads = [LoopThread(("asyncio", "uvloop", "trio")[n % 3], body) for n in range(loops)]
    asked.wait(10)
    before = engine.stats()
    engine.resume()
    for thread in threads:
        thread.join()
    assert_idle(engine)
    after = engine.stats()
    assert after.steps - before.steps == NEW
    assert loops * NEW <= after.loop_wakeups - before.loop_wakeups <= loops * (NEW + 2)
    asyncio.run(engine.aclose())
