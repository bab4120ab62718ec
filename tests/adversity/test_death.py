"""A fault of the device, or of the engine itself: every stream hears of it once, and the engine may be started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from cbengine import (
    AsyncEngine,
    EngineDeadError,
    EngineStoppedError,
    FinishReason,
    RequestStatus,
    TokenStream,
)
from cbengine.devices.base import DeviceLostError
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, fake_engine, prompt, read_some
from tests.loops.runs import LoopThread
from tests.support.loops import aio, eventually

NEW = 60


class Defect(Exception):
    """A defect of the engine itself."""


def _raise(*_: Any, **__: Any) -> Any:
    raise Defect("planted")


def _parts(engine: AsyncEngine) -> Any:
    worker = engine._worker
    assert worker is not None and worker.built is not None
    return worker.built.loop.parts


def _lose_the_device(inputs: StepInputs) -> None:
    raise DeviceLostError("fell off the bus")


def _in_forward(engine: AsyncEngine, model: FakeModel) -> None:
    model.fault = _lose_the_device


FAULTS: dict[str, tuple[type[Exception], Callable[[AsyncEngine, FakeModel], None]]] = {
    "device": (DeviceLostError, _in_forward),
    "scheduler": (Defect, lambda engine, _: setattr(_parts(engine).scheduler, "plan", _raise)),
    "commit": (Defect, lambda engine, _: setattr(_parts(engine).committer, "commit", _raise)),
    "lifecycle": (Defect, lambda engine, _: setattr(_parts(engine).lifecycle, "step_committed", _raise)),
    "launch": (Defect, lambda engine, _: setattr(_parts(engine).pipeline, "launch", _raise)),
    "outbox": (Defect, lambda engine, _: setattr(_parts(engine).outbox, "token", _raise)),
    "registry": (Defect, lambda engine, _: setattr(_parts(engine).registry, "scheduled", _raise)),
}
every_fault = pytest.mark.parametrize("fault", FAULTS)


async def _die(engine: AsyncEngine, model: FakeModel, gate: Gate, fault: str) -> list[TokenStream]:
    """Streams in every state, and the fault while they are in it."""
    try:
        streams = [engine.stream(prompt(5, n), max_new_tokens=NEW, ignore_eos=True) for n in range(2)]
        await gate.steps(5)
        assert len(await read_some(streams[0], 2)) == 2
        await eventually(lambda: engine.stats().steps == gate.arrived + 1)
        # The engine thread stands still now: two steps are launched, and the first of them is at the gate.
        streams += [engine.stream(prompt(50), max_new_tokens=NEW), engine.stream(prompt(9), max_new_tokens=NEW)]
        streams += [engine.stream("x" * 5000, max_new_tokens=NEW)]
        FAULTS[fault][1](engine, model)
        streams += [engine.stream(prompt(8), max_new_tokens=NEW)]
    finally:
        gate.open()
    await eventually(lambda: engine.health().status == "dead")
    return streams


@aio(trio=True)
@every_fault
async def test_every_stream_hears_of_it_once_and_the_engine_starts_again(fault: str) -> None:
    gate = Gate()
    model = FakeModel(fault=gate, max_model_len=6000)
    engine = fake_engine(model, num_blocks=1600, max_requests_per_batch=3)
    async with engine:
        streams = await _die(engine, model, gate, fault)
        cause = engine.health().error
        assert isinstance(cause, FAULTS[fault][0]) and not engine.health()
        errors: list[EngineDeadError] = []
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"the engine died of .*; start\(\) may be tried again") as caught:
                while True:
                    await stream.__anext__()
            errors.append(caught.value)
            assert caught.value.__cause__ is cause and caught.value.request_id == stream.request_id
            assert stream.finish_reason is FinishReason.ERROR and stream.status is RequestStatus.FAILED
            assert await read_some(stream, 1) == []  # once
            with pytest.raises(EngineDeadError):
                await stream.result()
        assert len({id(error) for error in errors}) == len(streams)
        assert len(streams[0].token_ids) >= 2  # what it had said stays readable
        await _refuses_everything(engine, cause)

        model.fault = None
        await engine.start()
        assert engine.health() and engine.health().error is None
        answer = await engine.generate(prompt(5), max_new_tokens=9, ignore_eos=True)
        assert answer.token_ids == tuple(model.reference(prompt(5), 9, ignore_eos=True))


async def _refuses_everything(engine: AsyncEngine, cause: BaseException) -> None:
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="died of") as caught:
            engine.stream(prompt(5), request_id="late")
        assert caught.value.__cause__ is cause and caught.value.request_id == "late"
    with pytest.raises(EngineDeadError):
        await engine.generate(prompt(5))
    with pytest.raises(EngineDeadError):
        await engine.generate_batch([prompt(5)])
    with pytest.raises(EngineDeadError):
        engine.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(EngineDeadError):
        await engine.pause()
    engine.resume()
    await engine.stop()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.labels, stats.pages_used, stats.rows_used, stats.steps_in_flight) == (
        0,
    ) * 6
    assert stats.generated_tokens > 0 and stats.requests_failed == 6
    assert engine.health().error is cause


@aio(trio=True)
async def test_whoever_waits_for_the_engine_hears_of_it() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    engine = fake_engine(model)
    heard: dict[str, BaseException | None] = {}

    async def wait(name: str, ask: Callable[[], Any]) -> None:
        try:
            await ask()
            heard[name] = None
        except EngineDeadError as error:
            heard[name] = error

    async with engine:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        await eventually(lambda: engine.stats().steps_in_flight == 2 and gate.arrived == 1)
        model.fault = _lose_the_device
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "pause", engine.pause)
            group.start_soon(wait, "result", stream.result)
            group.start_soon(wait, "generate", lambda: engine.generate(prompt(6)))
            await eventually(lambda: engine.stats().labels == 2)
            group.start_soon(wait, "stop", engine.stop)
            await eventually(lambda: engine.health().status == "stopping")
            gate.open()
        assert isinstance(heard["pause"], EngineDeadError) and isinstance(heard["result"], EngineDeadError)
        assert isinstance(heard["generate"], EngineDeadError)
        assert heard["stop"] is None  # it has ended, which is what was asked for


@aio
async def test_readers_on_other_loops_hear_of_it_too() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    engine = fake_engine(model)
    heard: list[BaseException | None] = []

    async def read() -> None:
        stream = engine.stream(prompt(5), max_new_tokens=NEW, ignore_eos=True)
        try:
            async for _ in stream:
                pass
        except EngineDeadError as error:
            heard.append(error.__cause__)

    async with engine:
        threads = [LoopThread(kind, read) for kind in ("asyncio", "uvloop", "trio")]
        await eventually(lambda: engine.stats().labels == 3)
        model.fault = _lose_the_device
        gate.open()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    assert heard == [engine.health().error] * 3


@aio(trio=True)
async def test_it_may_die_and_be_started_again_and_again() -> None:
    model = FakeModel()
    engine = fake_engine(model)
    for _ in range(4):
        await engine.start()
        model.fault = _lose_the_device
        with pytest.raises(EngineDeadError):
            await engine.generate(prompt(5))
        await eventually(lambda: engine.health().status == "dead")
        model.fault = None
        await engine.start()
        assert len((await engine.generate(prompt(5), max_new_tokens=4, ignore_eos=True)).token_ids) == 4
        await engine.stop()
    await engine.aclose()
    with pytest.raises(EngineStoppedError):
        await engine.start()


@aio(trio=True)
async def test_cancelling_and_closing_streams_of_a_dead_engine() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    engine = fake_engine(model)
    async with engine:
        streams = [engine.stream(prompt(5, n), max_new_tokens=NEW, ignore_eos=True) for n in range(3)]
        await gate.someone_waits()
        model.fault = _lose_the_device
        streams[0].cancel()
        gate.open()
        await eventually(lambda: engine.health().status == "dead")
        for stream in streams:
            await stream.aclose()
            stream.cancel()
        assert [token async for token in streams[0]] == []
        assert streams[0].finish_reason is FinishReason.CANCELLED
        streams.clear()
