"""Stopping: with what is under way finished first, for so long, or at once; and starting again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from cbengine import AsyncEngine, EngineStoppedError, FinishReason, RequestStatus
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, fake_engine, prompt, read, read_some, running
from tests.api.real import SETTINGS, TEXTS
from tests.cancel.suspensions import cancelled_at
from tests.support.loops import aio, eventually
from tests.support.models import Reference


def _expected(model: FakeModel, ids: list[int], new: int) -> tuple[int, ...]:
    return tuple(model.reference(ids, new, ignore_eos=True))


@aio(trio=True)
async def test_draining_finishes_what_runs_and_what_waits_and_refuses_the_rest() -> None:
    gate = Gate()
    model = FakeModel(fault=gate, max_model_len=6000)
    text = "x" * 5000
    async with running(model, num_blocks=1600, max_requests_per_batch=2, max_batch_tokens=512) as engine:
        streams = [engine.stream(prompt(5, n), max_new_tokens=9, ignore_eos=True) for n in range(6)]
        await gate.someone_waits()
        long = engine.stream(text, max_new_tokens=2, ignore_eos=True)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.stop)
            await eventually(lambda: engine.health().status == "stopping")
            for ask in (lambda: engine.stream(prompt(3), request_id="late"), lambda: engine.stream("y" * 5000)):
                with pytest.raises(EngineStoppedError, match="stopped"):
                    ask()
            with pytest.raises(EngineStoppedError):
                await engine.generate_batch([prompt(3)])
            gate.open()
        assert engine.health().status == "stopped"
        for n, stream in enumerate(streams):
            assert (await stream.result()).token_ids == _expected(model, prompt(5, n), 9)
        assert (await long.result()).token_ids == _expected(model, model.tokenizer.encode(text), 2)
        with pytest.raises(EngineStoppedError, match=r"`await engine.start\(\)` starts it again") as caught:
            engine.stream(prompt(3), request_id="late")
        assert caught.value.request_id == "late"


@aio(trio=True)
async def test_draining_finishes_requests_that_are_preempted_meanwhile() -> None:
    model = FakeModel()
    async with running(model, num_blocks=9) as engine:
        streams = [engine.stream(prompt(6, n), max_new_tokens=20, ignore_eos=True) for n in range(5)]
        await streams[0].__anext__()
        await engine.stop()
        for n, stream in enumerate(streams):
            assert (await stream.result()).token_ids == _expected(model, prompt(6, n), 20)
        assert engine.stats().preemptions > 0


@aio(trio=True)
async def test_a_drain_that_takes_too_long_becomes_a_hard_stop() -> None:
    model = FakeModel(delay=0.002)
    async with running(model, num_blocks=600) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=2000, ignore_eos=True)
        await stream.__anext__()
        await engine.stop(timeout=0.05)
        assert engine.health().status == "stopped"
        with pytest.raises(EngineStoppedError, match=f"before request '{stream.request_id}' had finished") as caught:
            await read(stream)
        assert caught.value.request_id == stream.request_id
        said = stream.token_ids
        assert said and said == _expected(model, prompt(5), len(said))


@aio(trio=True)
async def test_a_drain_in_time_is_not_cut_off() -> None:
    model = FakeModel()
    async with running(model) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=30, ignore_eos=True)
        await engine.stop(timeout=30)
        assert (await stream.result()).token_ids == _expected(model, prompt(5), 30)


@aio(trio=True)
async def test_a_hard_stop_ends_every_stream_with_its_error_once() -> None:
    gate = Gate()
    model = FakeModel(fault=gate, max_model_len=6000)
    async with running(model, num_blocks=1600, max_requests_per_batch=2) as engine:
        streams = [engine.stream(prompt(5, n), max_new_tokens=99, ignore_eos=True) for n in range(4)]
        await gate.steps(4)
        first = await read_some(streams[0], 2)
        streams.append(engine.stream("x" * 5000))
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.stop(hard=True))
            await eventually(lambda: engine.health().status == "stopping")
            gate.open()
        for stream in streams:
            with pytest.raises(EngineStoppedError):
                while True:
                    first += [await stream.__anext__()]
            assert await read_some(stream, 1) == []
            with pytest.raises(EngineStoppedError):
                await stream.result()
            assert stream.finish_reason is FinishReason.ERROR and stream.status is RequestStatus.FAILED
        assert streams[0].token_ids == _expected(model, prompt(5), len(streams[0].token_ids))
        assert engine.stats().requests_failed == 5 and engine.stats().labels == 0


@aio(trio=True)
async def test_stopping_twice_and_while_it_stops() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=5, ignore_eos=True)
        await gate.someone_waits()
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(engine.stop)
            await eventually(lambda: engine.health().status == "stopping")
            gate.open()
        assert len((await stream.result()).token_ids) == 5
        await engine.stop()
        await engine.stop(hard=True)
        assert engine.health().status == "stopped"


@aio(trio=True)
async def test_a_hard_stop_overtakes_a_drain() -> None:
    model = FakeModel(delay=0.002)
    async with running(model, num_blocks=600) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=2000, ignore_eos=True)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.stop)
            await stream.__anext__()
            await engine.stop(hard=True)
        with pytest.raises(EngineStoppedError):
            await stream.result()


@aio(trio=True)
async def test_a_drain_that_is_cut_off_stops_hard(loop_kind: str) -> None:
    model = FakeModel(delay=0.002)
    async with running(model, num_blocks=600) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=2000, ignore_eos=True)
        await stream.__anext__()
        assert await cancelled_at(0, engine.stop(), "waiting", loop_kind)
        await eventually(lambda: engine.health().status == "stopped")
        with pytest.raises(EngineStoppedError):
            await stream.result()


@aio(trio=True)
async def test_starting_while_it_stops_waits_for_the_end() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=5, ignore_eos=True)
        await gate.someone_waits()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.stop)
            await eventually(lambda: engine.health().status == "stopping")
            group.start_soon(engine.start)
            await anyio.sleep(0.01)
            gate.open()
        assert engine.health().status == "running"
        assert (await stream.result()).token_ids == _expected(model, prompt(5), 5)
        assert (await engine.generate(prompt(6), max_new_tokens=5, ignore_eos=True)).token_ids == _expected(
            model, prompt(6), 5
        )


@aio(trio=True)
async def test_closing_is_final_and_may_be_repeated() -> None:
    engine = fake_engine()
    async with engine:
        stream = engine.stream(prompt(5), max_new_tokens=300, ignore_eos=True)
        await stream.__anext__()
    with pytest.raises(EngineStoppedError):
        await stream.result()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(engine.aclose)
    await engine.stop()
    for ask in (
        lambda: engine.stream(prompt(3)),
        lambda: engine.chat([{"role": "user", "content": "Hi"}]),
        lambda: engine.as_completed([prompt(3)]),
    ):
        with pytest.raises(EngineStoppedError, match="closed"):
            ask()
    for call in (engine.start, engine.pause, lambda: engine.generate(prompt(3))):
        with pytest.raises(EngineStoppedError, match="closed"):
            await call()
    with pytest.raises(EngineStoppedError):
        async with engine:
            raise AssertionError("entered")


@aio(trio=True)
async def test_leaving_the_block_by_an_exception_closes_and_raises_it() -> None:
    engine = fake_engine(FakeModel(delay=0.001))
    with pytest.raises(ZeroDivisionError):
        async with engine:
            engine.stream(prompt(5), max_new_tokens=300, ignore_eos=True)
            raise ZeroDivisionError
    assert engine.health().status == "closed"


@aio(trio=True)
async def test_streams_of_an_earlier_run_stay_readable() -> None:
    model = FakeModel()
    async with running(model) as engine:
        done = engine.stream(prompt(5), max_new_tokens=6, ignore_eos=True)
        await engine.stop()
        await engine.start()
        assert [token.id for token in await read(done)] == list(_expected(model, prompt(5), 6))
        done.cancel()  # its run is over: nothing happens
        await done.aclose()
        again = engine.stream(prompt(5), max_new_tokens=6, ignore_eos=True)
        assert (await again.result()).token_ids == done.token_ids


@aio("asyncio")
async def test_a_real_model_drains_and_starts_again(
    real_model: Any, reference_generate: Reference, encode: Any
) -> None:
    async with AsyncEngine(real_model.runner, tokenizer=real_model.tokenizer, **SETTINGS) as engine:
        streams = [engine.stream(text, max_new_tokens=5, temperature=0) for text in TEXTS[:3]]
        await engine.stop()
        with pytest.raises(EngineStoppedError):
            engine.stream(TEXTS[0])
        for stream, text in zip(streams, TEXTS, strict=False):
            assert list((await stream.result()).token_ids) == reference_generate(encode(text), 5)
        await engine.start()
        again = await engine.generate(TEXTS[3], max_new_tokens=5, temperature=0)
        assert list(again.token_ids) == reference_generate(encode(TEXTS[3]), 5)
