"""What a stranger who tried to break the engine found, each by the right behaviour."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from cbengine import AsyncEngine, EngineDeadError, EngineStoppedError, FinishReason, InvalidRequestError
from cbengine.testing import FakeModel
from tests.support.leaks import idle
from tests.support.loops import aio, eventually

SETTINGS: dict[str, Any] = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 8}


def make(model: FakeModel | None = None, **settings: Any) -> AsyncEngine:
    return AsyncEngine(model or FakeModel(eos_token_ids=()), **{**SETTINGS, **settings})


@aio(trio=True)
@pytest.mark.parametrize("policy", ["pause", "abort"])
async def test_waiting_for_the_whole_answer_is_reading_it(policy: str) -> None:
    model = FakeModel(eos_token_ids=())
    async with make(model, backpressure=policy, stream_buffer=4) as engine:
        expected = tuple(model.reference([1, 2, 3], 60))
        assert (await engine.generate([1, 2, 3], max_new_tokens=60)).token_ids == expected
        batch = await engine.generate_batch([[1, 2, 3]] * 3, max_new_tokens=60, n=2)
        assert all(choice.token_ids == expected for answer in batch for choice in answer.choices)
        if policy == "pause":
            stream = engine.stream([1, 2, 3], max_new_tokens=60)
            async for token in stream:
                if token.index == 10:
                    break
            assert (await stream.result()).token_ids == expected
        await idle(engine)


@aio
async def test_a_deadline_in_three_hundred_years() -> None:
    async with make() as engine:
        await engine.generate([1], max_new_tokens=1, timeout=1e10)
        await engine.generate([1], max_new_tokens=1, queue_timeout=float(sys.maxsize))
        assert engine.health() and len((await engine.generate([1], max_new_tokens=3)).token_ids) == 3


@aio("asyncio")
async def test_deadlines_of_the_dead_are_forgotten() -> None:
    async with make() as engine:
        for _ in range(30):
            await engine.generate_batch([[1]] * 50, max_new_tokens=1, timeout=3600, queue_timeout=3600)
        worker = engine._worker
        assert worker is not None and worker.built is not None
        assert len(worker.built.loop._deadlines._heap) <= 1024 + 2


@aio
async def test_prompt_logprobs_of_preempted_prompts() -> None:
    model = FakeModel(eos_token_ids=())
    prompts = [[(11 * i + 3 * j) % 90 + 1 for j in range(9 + i)] for i in range(8)]
    tight = {"scheduler_type": "prefill_first", "num_blocks": 12, "max_batch_tokens": 8, "safety_margin": 0.0}
    async with make(model) as engine:
        quiet = [await engine.generate(prompt, max_new_tokens=12, prompt_logprobs=1) for prompt in prompts]
    async with make(model, **tight) as engine:
        for _ in range(5):
            answers = await engine.generate_batch(prompts, max_new_tokens=12, prompt_logprobs=1)
            for alone, answer in zip(quiet, answers, strict=True):
                assert answer.prompt_logprobs == alone.prompt_logprobs and answer.token_ids == alone.token_ids
        assert engine.stats().preemptions > 0


@aio
async def test_starting_again_from_the_error_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="cbengine")
    engine = make()
    await engine.start()
    for _ in range(8):
        worker = engine._worker
        assert worker is not None and worker.built is not None

        def broken() -> Any:
            raise RuntimeError("planted")

        worker.built.loop.parts.scheduler.plan = broken  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError):
            await engine.generate([1, 2], max_new_tokens=3)
        assert engine.health().status == "dead"
        await engine.start()
        assert len((await engine.generate([1, 2], max_new_tokens=3)).token_ids) == 3
    await engine.aclose()


@aio
async def test_draining_waits_for_no_reader() -> None:
    engine = make()
    await engine.start()
    stream = engine.stream([1, 2], max_new_tokens=60, backpressure="pause", stream_buffer=4)
    await eventually(lambda: len(stream.token_ids) >= 4)
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)
    with pytest.raises(EngineStoppedError):
        await engine.pause()
    await stopping
    assert stream.finish_reason == FinishReason.LENGTH and len(stream.token_ids) == 60
    await engine.aclose()


@aio("asyncio")
async def test_the_loop_of_a_paused_reader_closes() -> None:
    async with make() as engine:
        kept: list[Any] = []

        async def other() -> None:
            kept.append(engine.stream([1, 2], max_new_tokens=60, backpressure="pause", stream_buffer=4))
            await eventually(lambda: len(kept[0].token_ids) >= 4)

        thread = threading.Thread(target=lambda: asyncio.run(other()))
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.01)
        await idle(engine)
        kept.clear()


@aio
async def test_nothing_left_to_draw() -> None:
    model = FakeModel(eos_token_ids=(5,))
    async with make(model) as engine:
        for arguments in (
            {"allowed_token_ids": [5], "min_new_tokens": 3},
            {"allowed_token_ids": [7], "bad_words": [[7]]},
            {"bad_words": [[i] for i in range(97)]},
            {"logit_bias": {9: -1.0}, "allowed_token_ids": [9], "stop_token_ids": [9], "min_new_tokens": 1},
        ):
            with pytest.raises(InvalidRequestError, match="no token that may be drawn"):
                engine.stream([1, 2], max_new_tokens=4, **arguments)  # type: ignore[arg-type]
        await engine.generate([1, 2], max_new_tokens=4, allowed_token_ids=[5])


@aio("asyncio")
async def test_a_dropped_engine_ends() -> None:
    engine = make()
    await engine.start()
    worker = engine._worker
    assert worker is not None
    del engine
    gc.collect()
    await eventually(lambda: worker.state.value == "ended")


@aio("asyncio")
async def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="can't start"):
            await engine.start()
    await engine.start()
    assert len((await engine.generate([1], max_new_tokens=2)).token_ids) == 2
    await engine.aclose()


def test_after_a_fork() -> None:
    script = """
import asyncio, os
from cbengine import AsyncEngine, EngineStoppedError
from cbengine.testing import FakeModel

async def use(engine):
    try:
        await engine.generate([1], max_new_tokens=1)
    except EngineStoppedError as error:
        print(error)
    await engine.aclose()

engine = AsyncEngine(FakeModel(), page_size=4, num_blocks=16)
loop = asyncio.new_event_loop()
loop.run_until_complete(engine.start())
if os.fork() == 0:
    asyncio.run(use(engine))
    os._exit(0)
os.wait()
loop.run_until_complete(engine.aclose())
loop.close()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "another process" in done.stdout, done.stderr
