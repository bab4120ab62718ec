"""A client cancelled at every await of its life: nothing is left of it, and its neighbour never notices."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from cbengine import AsyncEngine
from cbengine.testing import FakeModel
from tests.api.fakes import fake_engine, prompt, running
from tests.cancel.suspensions import Life, Swallowed, cancelled_at
from tests.support.leaks import idle
from tests.support.loops import aio

PROMPT = prompt(20)
NEIGHBOUR = prompt(5, 1)
NEW = 4


async def iterate(engine: AsyncEngine) -> None:
    seen = [token async for token in engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True, request_id="life")]
    assert len(seen) == NEW


async def block(engine: AsyncEngine) -> None:
    async with engine.stream(PROMPT, max_new_tokens=300, ignore_eos=True, request_id="life") as stream:
        async for token in stream:
            if token.index == 2:
                break
    await stream.aclose()


async def result(engine: AsyncEngine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True, request_id="life")
    await stream.__anext__()
    await stream.result()
    await stream.result()


async def generate(engine: AsyncEngine) -> None:
    await engine.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, request_id="life")


async def generate_long_text(engine: AsyncEngine) -> None:
    await engine.generate("x" * 5000, max_new_tokens=2, ignore_eos=True, request_id="life")


async def batch(engine: AsyncEngine) -> None:
    await engine.generate_batch([PROMPT, prompt(3), prompt(40)], max_new_tokens=NEW, ignore_eos=True)


async def as_completed(engine: AsyncEngine) -> None:
    async for _ in engine.as_completed([PROMPT, prompt(3)], max_new_tokens=NEW, ignore_eos=True):
        await anyio.lowlevel.checkpoint()


async def slow_chunks(engine: AsyncEngine) -> None:
    async for _ in engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True, request_id="life").chunks():
        await anyio.sleep(0.002)


async def slow_reader_with_backpressure(engine: AsyncEngine) -> None:
    arguments = {"backpressure": "pause", "stream_buffer": 2}
    stream = engine.stream(PROMPT, max_new_tokens=6, ignore_eos=True, request_id="life", **arguments)  # type: ignore[arg-type]
    async for token in stream.text():
        await anyio.sleep(0.001 if token else 0)


async def paused(engine: AsyncEngine) -> None:
    async with engine.paused():
        stream = engine.stream(PROMPT, max_new_tokens=2, ignore_eos=True, request_id="life")
        await anyio.lowlevel.checkpoint()
    await stream.result()


async def timed_out(engine: AsyncEngine) -> None:
    with anyio.move_on_after(0.004):
        await engine.generate(PROMPT, max_new_tokens=300, ignore_eos=True, request_id="life")


LIVES = [
    iterate,
    block,
    result,
    generate,
    generate_long_text,
    batch,
    as_completed,
    slow_chunks,
    slow_reader_with_backpressure,
    paused,
    timed_out,
]


@aio(trio=True)
@pytest.mark.parametrize("moment", ["waiting", "woken"])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
async def test_a_client_cancelled_at_every_await(
    life: Callable[[AsyncEngine], Life], moment: str, loop_kind: str
) -> None:
    model = FakeModel(max_model_len=6000, delay=0.0005)
    expected = tuple(model.reference(NEIGHBOUR, 9, ignore_eos=True))
    async with running(model, num_blocks=1400, max_batch_tokens=1024) as engine:
        k = 0
        while True:
            neighbour = engine.stream(NEIGHBOUR, max_new_tokens=9, ignore_eos=True, request_id="neighbour")
            reached = await cancelled_at(k, life(engine), moment, loop_kind)
            assert (await neighbour.result()).token_ids == expected
            await idle(engine)
            if not reached:
                break
            k += 1
        assert k >= 1
        assert engine.stats().requests_failed == 0


@aio(trio=True)
@pytest.mark.parametrize("moment", ["waiting", "woken"])
async def test_a_whole_engine_cancelled_at_every_await(moment: str, loop_kind: str) -> None:
    """Start, answer, pause, stop, start again, close: wherever it is cut off, `aclose` brings everything back."""

    async def life() -> None:
        async with engine:
            await engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
            await engine.pause()
            engine.resume()
            unread = engine.stream(PROMPT, max_new_tokens=50, ignore_eos=True)
            await engine.stop()
            assert len((await unread.result()).token_ids) == 50
            await engine.start()
            await engine.generate(PROMPT, max_new_tokens=1)

    k = 0
    while True:
        engine = fake_engine()
        reached = await cancelled_at(k, life(), moment, loop_kind)
        # The block has closed the engine, unless it was cancelled in there.
        await engine.aclose()
        assert engine.health().status == "closed"
        if not reached:
            break
        k += 1
    assert k >= 5  # start, generate, stop, start, generate; in the others it waits only if the engine is slower


@aio(trio=True)
async def test_a_start_cut_off_may_be_repeated(loop_kind: str) -> None:
    model = FakeModel()
    engine = fake_engine(model)
    assert await cancelled_at(0, engine.start(), "waiting", loop_kind)
    await engine.start()
    completion = await engine.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)
    assert completion.token_ids == tuple(model.reference(PROMPT, NEW, ignore_eos=True))
    await engine.aclose()


@aio
async def test_the_driver_finds_a_swallowed_cancellation(loop_kind: str) -> None:
    async def swallow() -> None:
        try:
            await anyio.sleep(0.001)
        except BaseException:
            pass

    for moment in ("waiting", "woken"):
        with pytest.raises(Swallowed):
            await cancelled_at(0, swallow(), moment, loop_kind)
    assert not await cancelled_at(9, swallow(), "waiting", loop_kind)
