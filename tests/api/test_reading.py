"""Reading a stream: every view of it, again, by two, from elsewhere, and later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import anyio
import pytest

from cbengine import FinishReason, StreamClosedError, StreamConsumedError, StreamError, TokenStream
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, prompt, read, read_some, running
from tests.support.loops import aio, eventually

PROMPT = prompt(9)
NEW = 12


@aio(trio=True)
async def test_tokens_are_those_of_the_model() -> None:
    model = FakeModel()
    expected = model.reference(PROMPT, NEW, ignore_eos=True)
    async with running(model) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        tokens = await read(stream)
        assert [token.id for token in tokens] == expected
        assert [token.index for token in tokens] == list(range(NEW))
        assert [str(token) for token in tokens] == [model.tokenizer.decode([i]) for i in expected]
        assert [token.finish_reason for token in tokens] == [None] * (NEW - 1) + ["length"]
        assert stream.token_ids == tuple(expected)
        assert stream.text_so_far == "".join(token.text for token in tokens) == model.tokenizer.decode(expected)
        assert stream.finish_reason is FinishReason.LENGTH


@aio(trio=True)
async def test_a_stop_token_is_the_last_one_and_has_no_successor() -> None:
    model = FakeModel()
    answer = model.reference(PROMPT, NEW, ignore_eos=True)
    stop = answer[5]
    expected = model.reference(PROMPT, NEW, ignore_eos=True, stop_token_ids=[stop])
    async with running(model) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True, stop_token_ids=[stop])
        tokens = await read(stream)
        assert [token.id for token in tokens] == expected
        assert len(expected) <= 6
        assert [token.finish_reason for token in tokens] == [None] * (len(expected) - 1) + ["stop"]
        assert stream.finish_reason is FinishReason.STOP


@aio(trio=True)
async def test_every_view_joins_to_the_same_text() -> None:
    model = FakeModel(vocab_size=200)
    expected = model.tokenizer.decode(model.reference(PROMPT, NEW, ignore_eos=True))
    async with running(model) as engine:

        def start() -> TokenStream:
            return engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)

        assert "".join([piece async for piece in start().text()]) == expected
        assert "".join([chunk async for chunk in start().chunks()]) == expected
        assert "".join([token.text async for token in start()]) == expected
        assert (await start().result()).text == expected
        mixed = start()
        first = "".join(str(token) for token in await read_some(mixed, 3))
        rest = "".join([piece async for piece in mixed.text()])
        assert first + rest == expected


@aio
async def test_chunks_bring_everything_that_is_ready_at_once() -> None:
    model = FakeModel()
    async with running(model) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        await eventually(lambda: stream.finish_reason is not None)
        chunks = [chunk async for chunk in stream.chunks()]
        assert chunks == [model.tokenizer.decode(model.reference(PROMPT, NEW, ignore_eos=True))]


@aio
async def test_views_pass_over_tokens_without_text() -> None:
    model = FakeModel(eos_token_ids=(0, 5, 6, 7, 8, 9, 10, 11))  # special tokens, so they have no text
    expected = model.reference(PROMPT, 200, ignore_eos=True)
    assert any(i in model.spec.eos_token_ids for i in expected)
    async with running(model) as engine:
        pieces = [piece async for piece in engine.stream(PROMPT, max_new_tokens=200, ignore_eos=True).text()]
        chunks = [chunk async for chunk in engine.stream(PROMPT, max_new_tokens=200, ignore_eos=True).chunks()]
    assert "" not in pieces and "" not in chunks
    assert "".join(pieces) == "".join(chunks) == model.tokenizer.decode(expected)


@aio(trio=True)
async def test_result_during_after_and_without_iteration() -> None:
    model = FakeModel()
    expected = tuple(model.reference(PROMPT, NEW, ignore_eos=True))
    async with running(model) as engine:
        without = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        assert (await without.result()).token_ids == expected
        assert [token.id for token in await read(without)] == list(expected)  # result() reads nothing away

        during = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        await read_some(during, 4)
        completion = await during.result()
        assert completion.token_ids == expected
        assert [token.id for token in await read(during)] == list(expected[4:])

        after = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        await read(after)
        assert await after.result() == await after.result()
        assert (await after.result()).token_ids == expected


@aio(trio=True)
async def test_result_beside_a_reader() -> None:
    model = FakeModel()
    expected = model.reference(PROMPT, NEW, ignore_eos=True)
    results: list[tuple[int, ...]] = []
    tokens: list[int] = []

    async with running(model) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)

        async def wait() -> None:
            results.append((await stream.result()).token_ids)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
            tokens += [token.id async for token in stream]
    assert tokens == expected
    assert results == [tuple(expected)] * 2


@aio(trio=True)
async def test_going_on_after_a_break() -> None:
    model = FakeModel()
    expected = model.reference(PROMPT, NEW, ignore_eos=True)
    async with running(model) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        seen: list[int] = []
        for _ in range(3):
            async for token in stream:
                seen.append(token.id)
                if len(seen) % 4 == 3:
                    break
        seen += [token.id async for token in stream]
        assert seen == expected


@aio(trio=True)
async def test_reading_again_says_that_tokens_come_once() -> None:
    async with running() as engine:
        stream = engine.stream(PROMPT, max_new_tokens=3, request_id="once")
        await read(stream)
        for view in (stream, stream.text(), stream.chunks()):
            with pytest.raises(StreamConsumedError, match="delivered once") as caught:
                async for _ in view:
                    raise AssertionError("a token came twice")
            assert caught.value.request_id == "once"
        assert len((await stream.result()).token_ids) == 3


@aio(trio=True)
async def test_two_readers_at_once() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=5, ignore_eos=True)
        first: list[int] = []

        async def reader() -> None:
            first.extend([token.id async for token in stream])

        async with anyio.create_task_group() as group:
            group.start_soon(reader)
            await gate.someone_waits()
            await anyio.sleep(0.01)
            with pytest.raises(StreamConsumedError, match="another task"):
                await stream.__anext__()
            with pytest.raises(StreamConsumedError, match="another task"):
                async for _ in stream.chunks():
                    raise AssertionError("two readers shared the tokens")
            gate.open()
        assert first == model.reference(PROMPT, 5, ignore_eos=True)  # the first reader never noticed


@aio
async def test_another_loop_may_not_read() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=4, ignore_eos=True, request_id="mine")
        errors: list[BaseException] = []

        async def iterate() -> None:
            async for _ in stream:
                raise AssertionError("another loop got a token")

        async def elsewhere() -> None:
            for use in (iterate, stream.__anext__, stream.result):
                try:
                    await use()
                except StreamError as error:
                    errors.append(error)

        await anyio.to_thread.run_sync(lambda: asyncio.run(elsewhere()))
        assert [type(error) for error in errors] == [StreamError] * 3
        assert all("another event loop" in str(error) and "'mine'" in str(error) for error in errors)
        gate.open()
        assert len(await read(stream)) == 4  # and it took no harm
        errors.clear()
        await anyio.to_thread.run_sync(lambda: asyncio.run(_expect_stream_error(iterate, errors)))
        assert len(errors) == 1


async def _expect_stream_error(use: Callable[[], object], errors: list[BaseException]) -> None:
    try:
        await use()  # type: ignore[misc]
    except StreamError as error:
        errors.append(error)


@aio
async def test_closing_from_another_loop_cancels_and_says_that_it_is_the_wrong_one() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=4, ignore_eos=True)
        errors: list[BaseException] = []
        await anyio.to_thread.run_sync(lambda: asyncio.run(_expect_stream_error(stream.aclose, errors)))
        assert len(errors) == 1
        gate.open()
        assert await read(stream) == []
        await stream.aclose()
        assert stream.finish_reason is FinishReason.CANCELLED


@aio
async def test_no_loop_no_stream() -> None:
    async with running() as engine:
        errors: list[BaseException] = []

        def outside() -> None:
            try:
                engine.stream(PROMPT)
            except StreamError as error:
                errors.append(error)

        thread = threading.Thread(target=outside)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        assert len(errors) == 1 and "no event loop" in str(errors[0])
        assert engine.stats().labels == 0


@aio
async def test_a_stream_may_be_made_in_a_callback_of_the_loop() -> None:
    model = FakeModel()
    async with running(model) as engine:
        made: asyncio.Future[TokenStream] = asyncio.get_running_loop().create_future()

        def callback() -> None:
            try:
                made.set_result(engine.stream(PROMPT, max_new_tokens=5, ignore_eos=True))
            except Exception as error:
                made.set_exception(error)

        asyncio.get_running_loop().call_soon(callback)
        assert (await (await made).result()).token_ids == tuple(model.reference(PROMPT, 5, ignore_eos=True))


@aio(trio=True)
async def test_a_closed_stream_has_no_result_but_keeps_its_text() -> None:
    model = FakeModel()
    async with running(model) as engine:
        async with engine.stream(PROMPT, max_new_tokens=400, ignore_eos=True, request_id="left") as stream:
            await read_some(stream, 3)
        with pytest.raises(StreamClosedError, match="'left' was closed") as caught:
            await stream.result()
        assert caught.value.request_id == "left"
        assert stream.token_ids[:3] == tuple(model.reference(PROMPT, 3, ignore_eos=True))
        assert len(stream.text_so_far) >= 3
        assert stream.finish_reason is FinishReason.CANCELLED
        await stream.aclose()  # again does nothing


@aio(trio=True)
async def test_closing_a_finished_stream_takes_nothing_away() -> None:
    async with running() as engine:
        async with engine.stream(PROMPT, max_new_tokens=5, ignore_eos=True) as stream:
            await stream.result()
        assert len((await stream.result()).token_ids) == 5
        assert stream.finish_reason is FinishReason.LENGTH
        stream.cancel()
        assert stream.finish_reason is FinishReason.LENGTH
        assert len((await stream.result()).token_ids) == 5


@aio(trio=True)
async def test_the_outcome_of_an_unfinished_stream_is_refused() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=2, ignore_eos=True)
        with pytest.raises(StreamError, match="not ended yet"):
            stream.outcome()
        assert "tokens>" in repr(stream) and stream.request_id in repr(stream)
        gate.open()
        assert await stream.result() == stream.outcome()
