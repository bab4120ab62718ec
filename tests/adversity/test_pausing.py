"""Holding the engine at a step boundary."""

from __future__ import annotations

import anyio
import pytest

from cbengine import EngineStoppedError, FinishReason, RequestStatus
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, prompt, read_some, running
from tests.cancel.suspensions import cancelled_at
from tests.loops.runs import LoopThread
from tests.support.loops import aio, eventually

NEW = 30


@aio(trio=True)
async def test_nothing_is_computed_inside_and_everything_goes_on_after() -> None:
    model = FakeModel()
    expected = [tuple(model.reference(prompt(5, n), NEW, ignore_eos=True)) for n in range(4)]
    async with running(model) as engine:
        streams = [engine.stream(prompt(5, n), max_new_tokens=NEW, ignore_eos=True) for n in range(3)]
        await streams[0].__anext__()
        for _ in range(3):
            async with engine.paused():
                before = engine.stats()
                assert before.steps_in_flight == 0 and model.forwards == before.steps
                if len(streams) == 3:
                    streams.append(engine.stream(prompt(5, 3), max_new_tokens=NEW, ignore_eos=True))
                await anyio.sleep(0.01)
                after = engine.stats()
                assert (after.steps, after.generated_tokens) == (before.steps, before.generated_tokens)
                assert model.forwards == before.steps
            await eventually(lambda before=before: engine.stats().steps > before.steps)
        assert [(await stream.result()).token_ids for stream in streams] == expected


@aio(trio=True)
async def test_it_waits_for_the_steps_in_flight() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        await eventually(lambda: engine.stats().steps_in_flight == 2)
        paused = anyio.Event()

        async def pause() -> None:
            await engine.pause()
            paused.set()

        async with anyio.create_task_group() as group:
            group.start_soon(pause)
            await anyio.wait_all_tasks_blocked()
            await gate.steps(1)
            await anyio.sleep(0.005)
            assert not paused.is_set()  # a step is still at the gate
            gate.let_pass(1)
            await paused.wait()
        assert engine.stats().steps_in_flight == 0 and engine.stats().steps == 2
        assert len(stream.token_ids) <= 2
        engine.resume()
        gate.open()
        assert len((await stream.result()).token_ids) == NEW


@aio(trio=True)
async def test_pauses_are_counted() -> None:
    async with running() as engine:
        await engine.pause()
        await engine.pause()
        stream = engine.stream(prompt(5), max_new_tokens=3, ignore_eos=True)
        engine.resume()
        await anyio.sleep(0.005)
        assert stream.status is RequestStatus.PENDING and engine.stats().steps == 0
        engine.resume()
        assert len((await stream.result()).token_ids) == 3
        for _ in range(5):
            engine.resume()  # more than there were pauses: changes nothing
        async with engine.paused():
            second = engine.stream(prompt(6), max_new_tokens=3, ignore_eos=True)
            await anyio.sleep(0.005)
            assert second.status is RequestStatus.PENDING
        await second.result()


@aio(trio=True)
async def test_many_pause_at_once_and_leave_in_any_order() -> None:
    async with running() as engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        inside = 0

        async def hold(seconds: float) -> None:
            nonlocal inside
            async with engine.paused():
                inside += 1
                steps = engine.stats().steps
                await anyio.sleep(seconds)
                assert engine.stats().steps == steps
            inside -= 1

        async with anyio.create_task_group() as group:
            for seconds in (0.012, 0.004, 0.008):
                group.start_soon(hold, seconds)
        assert inside == 0
        assert len((await stream.result()).token_ids) == NEW


@aio(trio=True)
async def test_a_pause_that_is_cut_off_is_taken_back(loop_kind: str) -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        await gate.someone_waits()
        assert await cancelled_at(0, engine.pause(), "waiting", loop_kind)
        gate.open()
        assert len((await stream.result()).token_ids) == NEW


@aio(trio=True)
async def test_an_exception_inside_resumes() -> None:
    async with running() as engine:
        stream = engine.stream(prompt(5), max_new_tokens=300, ignore_eos=True)
        with pytest.raises(ZeroDivisionError):
            async with engine.paused():
                raise ZeroDivisionError
        assert len((await stream.result()).token_ids) == 300


@aio(trio=True)
async def test_who_leaves_during_a_pause_gives_everything_back_at_once() -> None:
    model = FakeModel()
    async with running(model) as engine:
        stays = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        leaves = engine.stream(prompt(6), max_new_tokens=300, ignore_eos=True)
        await leaves.__anext__()
        async with engine.paused():
            assert engine.stats().rows_used == 2
            await leaves.aclose()
            assert leaves.finish_reason is FinishReason.CANCELLED
            assert engine.stats().rows_used == engine.stats().labels == 1
            waits = engine.stream(prompt(7), max_new_tokens=3)
            await waits.aclose()
            assert engine.stats().labels == 1
        assert (await stays.result()).token_ids == tuple(model.reference(prompt(5), NEW, ignore_eos=True))


@aio(trio=True)
async def test_stopping_lifts_every_pause() -> None:
    model = FakeModel()
    async with running(model) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        await engine.pause()
        await engine.pause()
        await engine.stop()
        assert (await stream.result()).token_ids == tuple(model.reference(prompt(5), NEW, ignore_eos=True))
        await engine.start()
        assert len((await engine.generate(prompt(4), max_new_tokens=3, ignore_eos=True)).token_ids) == 3


@aio(trio=True)
async def test_a_hard_stop_during_a_pause() -> None:
    async with running() as engine:
        async with engine.paused():
            stream = engine.stream(prompt(5), max_new_tokens=NEW)
            await engine.stop(hard=True)
        with pytest.raises(EngineStoppedError):
            await stream.result()


@aio(trio=True)
async def test_a_pause_of_an_earlier_run_does_not_resume_a_later_one() -> None:
    async with running() as engine:
        async with engine.paused():
            await engine.stop()
            await engine.start()
            await engine.pause()
        stream = engine.stream(prompt(5), max_new_tokens=3, ignore_eos=True)
        await anyio.sleep(0.01)
        assert stream.status is RequestStatus.PENDING
        engine.resume()
        await stream.result()


@aio(trio=True)
async def test_whoever_waits_for_a_pause_hears_of_the_stop() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        await eventually(lambda: engine.stats().steps_in_flight == 2)
        ended: list[bool] = []

        async def pause() -> None:
            # The stop may come before the steps in flight have gone through, or after.
            try:
                await engine.pause()
                ended.append(True)
            except EngineStoppedError:
                ended.append(False)

        async with anyio.create_task_group() as group:
            group.start_soon(pause)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(lambda: engine.stop(hard=True))
            await eventually(lambda: engine.health().status == "stopping")
            gate.open()
        assert len(ended) == 1
        with pytest.raises(EngineStoppedError):
            await stream.result()


@aio
async def test_a_pause_from_another_thread() -> None:
    async with running() as engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        await read_some(stream, 2)
        thread = LoopThread("trio", engine.pause)
        await anyio.to_thread.run_sync(thread.join)
        steps = engine.stats().steps
        await anyio.sleep(0.005)
        assert engine.stats().steps == steps and engine.stats().steps_in_flight == 0
        engine.resume()
        assert len((await stream.result()).token_ids) == NEW
