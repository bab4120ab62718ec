"""Deadlines, held by the engine thread, and slow readers."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from cbengine import (
    AsyncEngine,
    FinishReason,
    InvalidRequestError,
    RequestFailedError,
    RequestTimeoutError,
    TokenStream,
)
from cbengine.testing import FakeModel
from tests.support.leaks import idle
from tests.support.loops import aio, eventually

PROMPT = [5, 6, 7]
SETTINGS: dict[str, Any] = {"page_size": 4, "num_blocks": 256, "max_batch_tokens": 16, "max_requests_per_batch": 4}


def make(**model: Any) -> AsyncEngine:
    return AsyncEngine(FakeModel(eos_token_ids=(), **model), **SETTINGS)


@aio(trio=True)
async def test_while_decoding() -> None:
    async with make(delay=0.01) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=500, timeout=0.2)
        got: list[int] = []
        with pytest.raises(TimeoutError) as caught:
            async for token in stream:
                got.append(token.id)
        assert isinstance(caught.value, RequestTimeoutError) and caught.value.request_id == stream.request_id
        assert stream.finish_reason == FinishReason.TIMEOUT
        assert got and tuple(got) == stream.token_ids == tuple(FakeModel(eos_token_ids=()).reference(PROMPT, len(got)))
        await idle(engine)


@aio
async def test_while_prefilling() -> None:
    async with make(delay=0.05) as engine:
        with pytest.raises(RequestTimeoutError):
            await engine.generate(PROMPT * 60, max_new_tokens=2, timeout=0.2)  # 12 steps of prompt
        stream = engine.stream(PROMPT * 60, max_new_tokens=2, timeout=0.2)
        await eventually(lambda: stream.finish_reason is not None)
        await idle(engine)  # its pages are back, whether somebody reads or not
        assert stream.finish_reason == FinishReason.TIMEOUT and stream.token_ids == ()


@aio
async def test_while_queued_and_while_paused() -> None:
    async with make() as engine:
        async with engine.paused():
            started = time.monotonic()
            with pytest.raises(RequestTimeoutError, match="without being scheduled"):
                await engine.generate(PROMPT, queue_timeout=0.1)
            with pytest.raises(RequestTimeoutError):
                await engine.generate(PROMPT, timeout=0.1)
            assert time.monotonic() - started >= 0.2
            await idle(engine)
        # Once scheduled, the queue timeout is met, however long the rest takes.
        assert (await engine.generate(PROMPT, max_new_tokens=5, queue_timeout=30.0)).finish_reason == "length"


@aio
async def test_while_waiting_for_a_place() -> None:
    model = FakeModel(eos_token_ids=(), delay=0.003)
    async with AsyncEngine(model, **SETTINGS) as engine:
        ahead = [engine.stream([i, *PROMPT], max_new_tokens=90) for i in range(1, 5)]  # all the places there are
        await eventually(lambda: all(len(stream.token_ids) > 1 for stream in ahead))
        late = engine.stream(PROMPT, max_new_tokens=2, timeout=0.05)
        with pytest.raises(RequestTimeoutError):
            await late.result()
        assert late.token_ids == () and engine.stats().waiting == 0
        for i, stream in enumerate(ahead, 1):
            assert list((await stream.result()).token_ids) == model.reference([i, *PROMPT], 90)


@aio
async def test_while_the_engine_is_paused_in_the_middle_of_an_answer() -> None:
    async with make(delay=0.002) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=2000, timeout=0.3)
        await eventually(lambda: len(stream.token_ids) > 3)
        async with engine.paused():
            await eventually(lambda: stream.finish_reason is not None)
            await idle(engine)
            await said_so_far(stream)


@aio
async def test_while_its_reader_is_waited_for() -> None:
    async with make() as engine:
        asleep = engine.stream(PROMPT, max_new_tokens=57, backpressure="pause", stream_buffer=20, timeout=0.5)
        await eventually(lambda: asleep.finish_reason is not None)
        await idle(engine)
        await said_so_far(asleep, at_least=20)


@aio("asyncio")
async def test_while_preempted() -> None:
    small: dict[str, Any] = {**SETTINGS, "num_blocks": 16, "safety_margin": 0.0}
    async with AsyncEngine(FakeModel(eos_token_ids=()), **small) as engine:
        asleep = engine.stream(PROMPT, max_new_tokens=57, backpressure="pause", stream_buffer=8, timeout=2.0)
        await eventually(lambda: len(asleep.token_ids) >= 8)
        await engine.generate(PROMPT * 20, max_new_tokens=3)  # which takes all the pages
        assert asleep.metrics.preemptions == 1 and asleep.finish_reason is None
        await eventually(lambda: asleep.finish_reason is not None)
        await idle(engine)
        await said_so_far(asleep, at_least=8)


async def said_so_far(stream: TokenStream, at_least: int = 4) -> None:
    """What a request had said when its time was up can be read, and then the error comes."""
    got: list[int] = []
    with pytest.raises(RequestTimeoutError):
        async for token in stream:
            got.append(token.id)
    model = FakeModel(eos_token_ids=())
    assert len(got) >= at_least and got == model.reference(PROMPT, len(got)) == list(stream.token_ids)
    assert stream.text_so_far == model.tokenizer.decode(got) and stream.finish_reason == FinishReason.TIMEOUT


@aio
async def test_neighbours_of_a_late_one() -> None:
    model = FakeModel(eos_token_ids=(), delay=0.005)
    async with AsyncEngine(model, **SETTINGS) as engine:
        streams = [engine.stream([i, *PROMPT], max_new_tokens=60) for i in range(1, 4)]
        with pytest.raises(RequestTimeoutError):
            await engine.generate(PROMPT, max_new_tokens=500, timeout=0.1)
        for i, stream in enumerate(streams, 1):
            assert list((await stream.result()).token_ids) == model.reference([i, *PROMPT], 60)


@aio(trio=True)
async def test_buffered_reader_holds_nothing_up() -> None:
    async with make() as engine:
        stream = engine.stream(PROMPT, max_new_tokens=100)
        await eventually(lambda: len(stream.token_ids) == 100)
        await idle(engine)  # its pages are free though nothing was read
        assert len([token async for token in stream]) == 100


@aio(trio=True)
@pytest.mark.parametrize("room", [1, 2, 7])
async def test_paused_reader(room: int) -> None:
    model = FakeModel(eos_token_ids=())
    async with AsyncEngine(model, **SETTINGS) as engine:
        slow = engine.stream(PROMPT, max_new_tokens=50, backpressure="pause", stream_buffer=room)
        fast = await engine.generate(PROMPT, max_new_tokens=200)
        assert list(fast.token_ids) == model.reference(PROMPT, 200)
        assert room <= len(slow.token_ids) <= room + 2  # those that were in flight came too
        got: list[int] = []
        async for token in slow:
            got.append(token.id)
            if len(got) % 10 == 0:
                await anyio.sleep(0.002)
            assert len(slow.token_ids) - len(got) <= room + 2
        assert got == model.reference(PROMPT, 50)
        await idle(engine)


@aio
async def test_paused_readers_do_not_keep_others_out() -> None:
    # All rows taken by readers that have gone to sleep; one wakes up, and everybody gets on.
    async with make() as engine:
        asleep = [engine.stream([i, 1], max_new_tokens=30, backpressure="pause", stream_buffer=2) for i in range(1, 4)]
        await eventually(lambda: all(len(stream.token_ids) >= 2 for stream in asleep))
        assert len((await engine.generate(PROMPT, max_new_tokens=40)).token_ids) == 40
        for stream in asleep:
            assert len([chunk async for chunk in stream.chunks()]) > 1
        await idle(engine)


@aio
async def test_cancelling_a_paused_reader() -> None:
    async with make() as engine:
        stream = engine.stream(PROMPT, max_new_tokens=30, backpressure="pause", stream_buffer=2)
        await eventually(lambda: len(stream.token_ids) >= 2)
        await stream.aclose()
        await idle(engine)


@aio
async def test_aborted_reader() -> None:
    async with make() as engine:
        stream = engine.stream(PROMPT, max_new_tokens=100, backpressure="abort", stream_buffer=5)
        await eventually(lambda: stream.finish_reason is not None)
        got: list[int] = []
        with pytest.raises(RequestFailedError, match="unread"):
            async for token in stream:
                got.append(token.id)
        assert len(got) >= 5
        await idle(engine)


@aio("asyncio")
async def test_bad_values() -> None:
    async with make() as engine:
        for arguments, says in (
            ({"timeout": 0}, "above 0"),
            ({"timeout": float("nan")}, "above 0"),
            ({"queue_timeout": "1"}, "number of seconds"),
            ({"backpressure": "wait"}, "buffer, pause, abort"),
            ({"stream_buffer": 0}, "at least 1"),
            ({"time_out": 1}, "time_out"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                engine.stream(PROMPT, **arguments)  # type: ignore[arg-type]


@aio
async def test_a_paused_reader_gives_its_pages_to_who_needs_them() -> None:
    model = FakeModel(eos_token_ids=())
    small: dict[str, Any] = {**SETTINGS, "num_blocks": 16, "safety_margin": 0.0}
    async with AsyncEngine(model, **small) as engine:
        asleep = engine.stream(PROMPT, max_new_tokens=57, backpressure="pause", stream_buffer=20)
        await eventually(lambda: len(asleep.token_ids) >= 20)
        answer = await engine.generate(PROMPT, max_new_tokens=60)
        assert list(answer.token_ids) == model.reference(PROMPT, 60)
        assert asleep.metrics.preemptions >= 1
        assert [token.id async for token in asleep] == model.reference(PROMPT, 57)
        await idle(engine)
