"""Every way to leave a stream, at every step of its life."""

from __future__ import annotations

import asyncio
import contextlib

import anyio
import anyio.to_thread
import pytest

from tests.cancel.leaver import OFFSETS, Leaver, Way, leave_at
from tests.support.loops import aio


async def cancel(leaver: Leaver) -> None:
    leaver.stream.cancel()
    leaver.stream.cancel()  # any number of times
    await leaver.ended.wait()


async def cancel_in_a_thread(leaver: Leaver) -> None:
    await anyio.to_thread.run_sync(leaver.stream.cancel)
    await leaver.ended.wait()


async def close(leaver: Leaver) -> None:
    """`aclose` while the reader waits in `__anext__`."""
    await leaver.stream.aclose()
    await leaver.ended.wait()


async def close_twice_at_once(leaver: Leaver) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(leaver.stream.aclose)
        group.start_soon(leaver.stream.aclose)


async def cancel_the_scope(leaver: Leaver) -> None:
    leaver.scope.cancel()
    await leaver.ended.wait()


async def deadline(leaver: Leaver) -> None:
    leaver.scope.deadline = anyio.current_time()
    await leaver.ended.wait()


WHILE_READING = [cancel, cancel_in_a_thread, close, close_twice_at_once, cancel_the_scope, deadline]


@aio("asyncio", "trio")
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("way", WHILE_READING, ids=lambda w: w.__name__)
async def test_leaving_while_a_task_reads(way: Way, offset: int) -> None:
    await leave_at(offset, way)


@aio("uvloop", "eager")
@pytest.mark.parametrize("offset", [0, 2, 5])
@pytest.mark.parametrize("way", WHILE_READING, ids=lambda w: w.__name__)
async def test_leaving_on_other_loops(way: Way, offset: int) -> None:
    await leave_at(offset, way)


async def leave_the_block(leaver: Leaver) -> None:
    async with leaver.stream:
        pass


async def raise_in_the_block(leaver: Leaver) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with leaver.stream:
            raise ZeroDivisionError


async def cancelled_result(leaver: Leaver) -> None:
    with anyio.move_on_after(0):
        await leaver.stream.result()
    leaver.stream.cancel()  # a result that was there already is no reason to leave


@aio("asyncio", "trio")
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("way", [leave_the_block, raise_in_the_block, cancelled_result], ids=lambda w: w.__name__)
async def test_leaving_without_a_reader(way: Way, offset: int) -> None:
    await leave_at(offset, way, read=False)


@aio(trio=True)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 6, 9, 11])
async def test_dropping_the_last_reference(offset: int) -> None:
    await leave_at(offset, _forget, read=False, keep=False)


async def _forget(leaver: Leaver) -> None:
    if leaver.stream.token_ids:
        async for token in leaver.stream:
            leaver.seen.append(token.id)
            break
    del leaver.stream


async def cancel_the_task(leaver: Leaver) -> None:
    task = asyncio.get_running_loop().create_task(leaver.read())
    await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (not ended)


async def wait_for_a_token(leaver: Leaver) -> None:
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        while True:
            leaver.seen.append((await asyncio.wait_for(leaver.stream.__anext__(), 0.003)).id)


async def wait_for_the_result(leaver: Leaver) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(leaver.stream.result(), 0.003)
    leaver.stream.cancel()  # a result that was there already is no reason to leave


async def timeout(leaver: Leaver) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.003):
            await leaver.read()


@aio("asyncio", "eager")
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    "way", [cancel_the_task, wait_for_a_token, wait_for_the_result, timeout], ids=lambda w: w.__name__
)
async def test_leaving_by_the_means_of_asyncio(way: Way, offset: int) -> None:
    await leave_at(offset, way, read=False)
