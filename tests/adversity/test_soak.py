"""Thousands of tiny requests, many of them cancelled: nothing grows."""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from cbengine import AsyncEngine
from cbengine.execution.slots import Layout
from cbengine.testing import FakeModel
from tests.adversity.census import PER_REQUEST, Record, living, resident
from tests.api.fakes import prompt, running
from tests.support.leaks import idle
from tests.support.loops import aio

CLIENTS = 40


async def _soak(engine: AsyncEngine, requests: int, rng: random.Random) -> None:
    """`requests` requests by `CLIENTS` clients. About a third of them leave early, each in one of five ways."""
    todo = iter(range(requests))

    async def client() -> None:
        for number in todo:
            await rng.choice(ways)(number)

    def ask(number: int) -> dict[str, object]:
        return {"max_new_tokens": 1 + number % 5, "ignore_eos": True, "request_id": f"soak {number}"}

    async def read(number: int) -> None:
        async for _ in engine.stream(prompt(1 + number % 9), **ask(number)):  # type: ignore[arg-type]
            pass

    async def generate(number: int) -> None:
        await engine.generate("hello"[: 1 + number % 5], **ask(number))  # type: ignore[arg-type]

    async def cancel(number: int) -> None:
        stream = engine.stream(prompt(3), max_new_tokens=300, ignore_eos=True)
        await anyio.lowlevel.checkpoint()
        stream.cancel()

    async def drop(number: int) -> None:
        engine.stream(prompt(3), max_new_tokens=300, ignore_eos=True)

    async def leave(number: int) -> None:
        with anyio.move_on_after(0.001):
            await engine.generate(prompt(4), max_new_tokens=300, ignore_eos=True)

    async def refuse(number: int) -> None:
        with pytest.raises(ValueError):
            engine.stream([], request_id=f"soak {number}")

    async def batch(number: int) -> None:
        async for _ in engine.as_completed([prompt(2), prompt(3)], max_new_tokens=1 + number % 3):
            break

    ways: list[Callable[[int], Awaitable[None]]] = [read, read, read, generate, generate]
    ways += [cancel, drop, leave, refuse, batch]
    async with anyio.create_task_group() as group:
        for _ in range(CLIENTS):
            group.start_soon(client)
    await idle(engine)


async def _measure(engine: AsyncEngine, rounds: int, requests: int, record: Record) -> float:
    """Soak in rounds; returns the growth of resident memory in bytes a request, the first two rounds left out."""
    rng = random.Random(1)
    sizes: list[int] = []
    for _ in range(rounds):
        await _soak(engine, requests, rng)
        Layout.of.cache_clear()  # a memo of bounded size, which would go on filling up
        gc.collect()
        sizes.append(resident())
        assert living(*PER_REQUEST) == {}
        worker = engine._worker
        assert worker is not None and worker.built is not None
        parts = worker.built.loop.parts
        assert not parts.requests and not worker.registry.num_labels and not worker.registry.num_queued
        assert parts.scheduler.num_waiting == parts.scheduler.num_running == 0
    growth = (sizes[-1] - sizes[1]) / (requests * (rounds - 2))
    record("resident_kib", [size // 1024 for size in sizes])
    record("growth_bytes_a_request", round(growth))
    print([size // 1024 for size in sizes], "KiB,", round(growth), "bytes a request")
    return growth


@aio("uvloop")
async def test_two_thousand_tiny_requests(record_property: Record) -> None:
    async with running(FakeModel(), num_blocks=400, max_batch_tokens=128, max_requests_per_batch=CLIENTS) as engine:
        await _measure(engine, 5, 400, record_property)
        stats = engine.stats()
        assert stats.requests_cancelled > 100 and stats.requests_finished > 1000 and stats.requests_failed == 0


@pytest.mark.slow
@aio("uvloop", timeout=600)
async def test_twenty_thousand_tiny_requests(record_property: Record) -> None:
    async with running(FakeModel(), num_blocks=400, max_batch_tokens=128, max_requests_per_batch=CLIENTS) as engine:
        # A kilobyte kept for each request would be 1,024; the allocator's own noise is far below that by now.
        assert await _measure(engine, 10, 2000, record_property) < 256
