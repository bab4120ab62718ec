"""One engine and several event loops: at once in threads, one after the other, and some that close too early."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from cbengine import AsyncEngine, RequestStatus, StreamError, TokenStream
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, fake_engine, prompt, read, read_some
from tests.loops.runs import LoopThread, run_on
from tests.support.leaks import assert_idle
from tests.support.loops import ALL_KINDS, eventually

KINDS = [kind for kind in ALL_KINDS if kind != "eager"]
every_kind = pytest.mark.parametrize("kind", ALL_KINDS)


@contextmanager
def started(model: FakeModel | None = None) -> Iterator[AsyncEngine]:
    """An engine that is started by one loop and closed by another; both are gone when it is used."""
    engine = fake_engine(model, num_blocks=256)
    asyncio.run(engine.start())
    try:
        yield engine
        assert_idle(engine)
    finally:
        if model is not None and isinstance(model.fault, Gate):
            model.fault.open()
        asyncio.run(engine.aclose())


@every_kind
def test_one_run_after_the_other(kind: str) -> None:
    model = FakeModel()
    expected = tuple(model.reference(prompt(9), 8, ignore_eos=True))
    answers: list[tuple[int, ...]] = []

    async def body() -> None:
        answers.append((await engine.generate(prompt(9), max_new_tokens=8, ignore_eos=True)).token_ids)
        answers.append(tuple(t.id for t in await read(engine.stream(prompt(9), max_new_tokens=8, ignore_eos=True))))

    with started(model) as engine:
        for _ in range(3):
            run_on(kind, body)
    assert answers == [expected] * 6


def test_loops_of_every_kind_at_once() -> None:
    model = FakeModel()
    barrier = threading.Barrier(len(KINDS) * 2)
    answers: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def body(kind: str, copy: int) -> LoopThread:
        async def run() -> None:
            barrier.wait(10)
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(ask, number)

        async def ask(number: int) -> None:
            stream = engine.stream(prompt(5 + number, copy), max_new_tokens=10, ignore_eos=True)
            answers[kind, copy, number] = tuple([token.id async for token in stream])

        return LoopThread(kind, run)

    with started(model) as engine:
        threads = [body(kind, copy) for kind in KINDS for copy in range(2)]
        for thread in threads:
            thread.join()
    assert len(answers) == len(KINDS) * 2 * 20
    for (_, copy, number), answer in answers.items():
        assert answer == tuple(model.reference(prompt(5 + number, copy), 10, ignore_eos=True))


@every_kind
def test_a_loop_that_closes_cancels_its_streams_and_disturbs_nobody(kind: str) -> None:
    gate = Gate()
    model = FakeModel(fault=gate, delay=0.002)
    kept: list[TokenStream] = []  # so that nothing but the closing of the loop ends them
    answers: list[list[int]] = []
    closed = threading.Event()

    async def leaves() -> None:
        kept.append(engine.stream(prompt(20), max_new_tokens=400, ignore_eos=True, request_id="decoding"))
        await read_some(kept[0], 2)
        kept.append(engine.stream(prompt(300), max_new_tokens=400, ignore_eos=True, request_id="prefilling"))
        kept.append(engine.stream("x" * 4100, request_id="tokenizing"))

    async def stays() -> None:
        stream = engine.stream(prompt(7), max_new_tokens=30, ignore_eos=True)
        gate.open()
        answers.append([token.id for token in await read_some(stream, 3)])
        await eventually(closed.is_set)
        answers[0] += [token.id async for token in stream]

    with started(model) as engine:
        thread = LoopThread("asyncio", stays)
        run_on(kind, leaves)
        closed.set()
        thread.join()
        assert_idle(engine)
        stats = engine.stats()
        assert stats.requests_finished == 1 and stats.requests_cancelled + stats.requests_failed == 3
        assert engine.health()
        assert all(not stream.status.ended for stream in kept)  # their loop is gone: they never hear of it
        kept.clear()
        gc.collect()
    assert answers == [model.reference(prompt(7), 30, ignore_eos=True)]


@every_kind
def test_a_request_that_is_taken_in_after_its_loop_has_closed(kind: str) -> None:
    gate = Gate()
    kept: list[TokenStream] = []

    async def body() -> None:
        kept.append(engine.stream(prompt(5), max_new_tokens=900, ignore_eos=True))
        await gate.steps(2)
        # The engine thread stands still at the gate, so these are in its inbox when the loop closes.
        kept.extend(engine.stream(prompt(5, n), max_new_tokens=900, ignore_eos=True) for n in range(3))

    with started(FakeModel(fault=gate)) as engine:
        run_on(kind, body)
        gate.open()
        assert_idle(engine)
        stats = engine.stats()
        assert stats.requests_cancelled == 4 and stats.requests_finished == 0
        kept.clear()


@every_kind
def test_a_stream_of_a_loop_that_is_gone_cannot_be_read(kind: str) -> None:
    kept: list[TokenStream] = []

    async def first() -> None:
        kept.append(engine.stream(prompt(20), max_new_tokens=3000, ignore_eos=True))
        await kept[0].__anext__()

    async def second() -> None:
        with pytest.raises(StreamError, match="another event loop"):
            await read(kept[0])
        with pytest.raises(StreamError, match="another event loop"):
            await kept[0].result()
        kept[0].cancel()  # which any thread may

    with started(FakeModel(delay=0.001)) as engine:
        run_on(kind, first)
        run_on(kind, second)
        assert_idle(engine)
        kept.clear()


@every_kind
def test_started_in_a_worker_thread_and_used_elsewhere(kind: str) -> None:
    model = FakeModel()
    engine = fake_engine(model)
    answers: list[tuple[int, ...]] = []

    async def use() -> None:
        answers.append((await engine.generate(prompt(6), max_new_tokens=5, ignore_eos=True)).token_ids)

    LoopThread(kind, engine.start).join()
    run_on("asyncio", use)
    LoopThread("trio", use).join()
    LoopThread(kind, engine.stop).join()
    run_on(kind, engine.start)
    LoopThread("uvloop", use).join()
    run_on("asyncio", engine.aclose)
    assert answers == [tuple(model.reference(prompt(6), 5, ignore_eos=True))] * 3


def test_started_by_several_threads_at_once_it_starts_once() -> None:
    loaded: list[int] = []

    class Counting(FakeModel):
        def bind(self, kv: object, page_size: int) -> None:
            loaded.append(page_size)
            super().bind(kv, page_size)  # type: ignore[arg-type]

    engine = fake_engine(Counting())
    barrier = threading.Barrier(8)

    async def start() -> None:
        barrier.wait(10)
        await engine.start()
        assert engine.health()

    threads = [LoopThread(KINDS[n % len(KINDS)], start) for n in range(8)]
    for thread in threads:
        thread.join()
    assert loaded == [4]
    run_on("asyncio", engine.aclose)


def test_stopped_by_one_loop_while_another_reads() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    answers: list[list[int]] = []

    async def reader() -> None:
        answers.append([token.id async for token in engine.stream(prompt(6), max_new_tokens=9, ignore_eos=True)])

    with started(model) as engine:
        thread = LoopThread("trio", reader)

        async def stop() -> None:
            await gate.someone_waits()
            gate.open()
            await engine.stop()

        run_on("uvloop", stop)
        thread.join()
    assert answers == [model.reference(prompt(6), 9, ignore_eos=True)]


@every_kind
def test_streams_left_behind_by_a_loop_that_raises(kind: str) -> None:
    async def body() -> None:
        streams = [engine.stream(prompt(9, n), max_new_tokens=300, ignore_eos=True) for n in range(5)]
        await streams[0].__anext__()
        assert streams[0].status is RequestStatus.DECODING
        raise KeyError("the program")

    with started(FakeModel(delay=0.002)) as engine:
        with pytest.raises(KeyError):
            run_on(kind, body)
        assert_idle(engine)
        assert engine.stats().requests_cancelled == 5


@every_kind
def test_ports_of_closed_loops_are_forgotten(kind: str) -> None:
    async def use() -> None:
        await engine.generate(prompt(3), max_new_tokens=2)

    with started() as engine:
        for _ in range(20):
            run_on(kind, use)
        deadline = time.monotonic() + 5
        while len(engine._ports._ports) and time.monotonic() < deadline:
            time.sleep(0.002)  # the engine thread may hold the last answer for a moment
        assert len(engine._ports._ports) == 0
