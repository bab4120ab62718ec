"""Starts that fail, that are cut off, that are asked for by many."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from cbengine import (
    AsyncEngine,
    EngineNotStartedError,
    EngineStoppedError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from cbengine.models.base import LayerSpec
from cbengine.testing import FakeModel
from tests.api.fakes import fake_engine, prompt, running
from tests.cancel.suspensions import cancelled_at
from tests.support.loops import aio, eventually


class SlowToLoad(FakeModel):
    """Loading (binding) waits until it is let go, and may fail then."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.binds = 0
        self.error: Exception | None = None

    def bind(self, kv: Any, page_size: int) -> None:
        self.binds += 1
        self.let_go.wait(10)
        if self.error is not None:
            raise self.error
        super().bind(kv, page_size)


@aio(trio=True)
async def test_before_the_start_nothing_is_taken() -> None:
    engine = fake_engine()
    for _ in range(2):
        with pytest.raises(EngineNotStartedError, match=r"use `async with engine` or `await engine.start\(\)`"):
            engine.stream(prompt(3))
    with pytest.raises(EngineNotStartedError):
        await engine.generate(prompt(3))
    with pytest.raises(EngineNotStartedError):
        await engine.generate_batch([prompt(3)])
    with pytest.raises(EngineNotStartedError):
        engine.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(EngineNotStartedError):
        await engine.pause()
    engine.resume()
    await engine.stop()
    assert engine.health().status == "new"


@aio(trio=True)
async def test_while_it_starts_nothing_is_taken() -> None:
    model = SlowToLoad()
    engine = fake_engine(model)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.start)
        await eventually(lambda: engine.health().status == "starting")
        with pytest.raises(EngineNotStartedError):
            engine.stream(prompt(3))
        model.let_go.set()
    assert (await engine.generate(prompt(3), max_new_tokens=1)).usage.prompt_tokens == 3
    await engine.aclose()


@aio(trio=True)
async def test_many_starts_at_once_load_once() -> None:
    model = SlowToLoad()
    engine = fake_engine(model)
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(engine.start)
        await eventually(lambda: model.binds == 1)
        model.let_go.set()
    await engine.start()
    assert model.binds == 1
    await engine.aclose()


@aio(trio=True)
async def test_everybody_who_starts_hears_that_it_failed_and_may_try_again() -> None:
    model = SlowToLoad()
    model.error = MemoryError("planted")
    engine = fake_engine(model)
    errors: list[BaseException] = []

    async def start() -> None:
        try:
            await engine.start()
        except MemoryError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(start)
        await eventually(lambda: model.binds == 1)
        model.let_go.set()
    assert errors == [model.error] * 3
    assert engine.health().status == "dead" and engine.health().error is model.error
    with pytest.raises(EngineNotStartedError, match="did not start: planted") as caught:
        engine.stream(prompt(3))
    assert caught.value.__cause__ is model.error
    with pytest.raises(EngineNotStartedError):
        _ = engine.memory_plan
    await engine.stop()
    model.error = None
    await engine.start()
    assert engine.health() and engine.health().error is None
    assert (await engine.generate(prompt(3), max_new_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
    await engine.aclose()


@aio(trio=True)
async def test_a_block_whose_start_fails_is_not_entered_and_leaves_nothing() -> None:
    model = SlowToLoad()
    model.error = OSError("planted")
    model.let_go.set()
    engine = fake_engine(model)
    with pytest.raises(OSError, match="planted"):
        async with engine:
            raise AssertionError("entered")
    with pytest.raises(EngineStoppedError, match="closed"):
        await engine.start()


@aio("asyncio", "trio")
@pytest.mark.parametrize("source", ["/nowhere/at/all", "./no-such-model.gguf", "no-such-owner/no-such-model"])
async def test_a_model_that_is_not_there(source: str) -> None:
    engine = AsyncEngine.from_pretrained(source)
    with pytest.raises((OSError, ValueError)):
        await engine.start()
    assert engine.health().status == "dead"
    await engine.aclose()


@aio("asyncio")
async def test_a_broken_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = AsyncEngine.from_pretrained(str(tmp_path))
    with pytest.raises((OSError, ValueError, InvalidRequestError)):
        await engine.start()
    await engine.aclose()


@aio("asyncio", "trio")
@pytest.mark.parametrize("model", [42, None, object(), ["model"]], ids=["42", "None", "object", "list"])
async def test_something_that_is_no_model(model: Any) -> None:
    engine = AsyncEngine(model)
    with pytest.raises(InvalidRequestError, match=r"a model is a hub id, a folder, a .gguf file or a transformers"):
        await engine.start()
    await engine.aclose()


@aio(trio=True)
async def test_a_model_with_an_attention_that_is_not_served() -> None:
    model = FakeModel()
    model.spec = replace(model.spec, layers=(LayerSpec("linear_attention", 1, 2),) * 2)
    engine = fake_engine(model)
    with pytest.raises(UnsupportedFeatureError, match="linear_attention"):
        await engine.start()
    await engine.aclose()


@aio(trio=True)
@pytest.mark.parametrize("settings", [{"device": "abacus"}, {"device": "cuda:99"}])
async def test_a_device_that_is_not_there(settings: dict[str, Any]) -> None:
    engine = fake_engine(**settings)
    with pytest.raises((ValueError, RuntimeError)):
        await engine.start()
    await engine.aclose()


@aio(trio=True)
async def test_a_start_that_is_cut_off_goes_on_and_may_be_joined(loop_kind: str) -> None:
    model = SlowToLoad()
    engine = fake_engine(model)
    assert await cancelled_at(0, engine.start(), "waiting", loop_kind)
    assert engine.health().status == "starting"
    async with anyio.create_task_group() as group:
        group.start_soon(engine.start)
        await eventually(lambda: model.binds == 1)
        model.let_go.set()
    assert engine.health() and model.binds == 1
    await engine.aclose()


@aio(trio=True)
async def test_a_block_that_is_cut_off_while_it_starts_closes_the_engine() -> None:
    model = SlowToLoad()
    engine = fake_engine(model)

    async def block() -> None:
        async with engine:
            raise AssertionError("entered")

    async with anyio.create_task_group() as group:
        group.start_soon(block)
        await eventually(lambda: model.binds == 1)
        model.let_go.set()
        group.cancel_scope.cancel()
    assert engine.health().status == "closed"


@aio(trio=True)
async def test_closing_while_it_starts() -> None:
    model = SlowToLoad()
    engine = fake_engine(model)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.start)
        await eventually(lambda: model.binds == 1)
        group.start_soon(engine.aclose)
        await anyio.sleep(0.01)
        model.let_go.set()
    assert engine.health().status == "closed"


@aio(trio=True)
async def test_starting_a_running_engine_does_nothing() -> None:
    async with running() as engine:
        stream = engine.stream(prompt(4), max_new_tokens=20, ignore_eos=True)
        await engine.start()
        assert len((await stream.result()).token_ids) == 20


@aio("asyncio")
async def test_a_real_model_starts_from_its_folder_off_the_loop(smollm2: Path) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await anyio.sleep(0.01)
            beats += 1

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        async with AsyncEngine.from_pretrained(str(smollm2), page_size=16, num_blocks=16) as engine:
            assert beats > 5  # the loop went on while it was loaded
            answer = await engine.generate("The capital of France is", max_new_tokens=3, temperature=0)
            assert "Paris" in answer.text
        group.cancel_scope.cancel()
