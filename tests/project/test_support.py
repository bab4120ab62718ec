"""The guards of the test suite bite: each finds what it is there for, on every loop."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.guard import LoopGuard
from tests.support.leaks import assert_idle, engine_threads, find_leaks, idle, watched
from tests.support.loops import ASYNCIO_KINDS, LoopFault, TestBody, aio, eventually, run_test

every_loop = pytest.mark.parametrize("kind", ASYNCIO_KINDS)


@aio(trio=True)
async def test_runs_on_the_loop_that_it_names(loop_kind: str) -> None:
    import sniffio

    assert sniffio.current_async_library() == ("trio" if loop_kind == "trio" else "asyncio")
    if loop_kind != "trio":
        loop = asyncio.get_running_loop()
        assert loop.get_debug()
        assert type(loop).__mro__[1].__module__.startswith("uvloop" if loop_kind == "uvloop" else "asyncio")
        assert (loop.get_task_factory() is not None) == (loop_kind == "eager")


@aio("asyncio")
async def test_can_name_a_single_loop(loop_kind: str, tmp_path: Any) -> None:
    assert loop_kind == "asyncio"
    assert tmp_path.is_dir()


@every_loop
def test_an_exception_that_nobody_retrieves_fails_the_test(kind: str) -> None:
    async def body() -> None:
        task = asyncio.get_running_loop().create_task(_raise(KeyError("lost")))
        await asyncio.wait([task])

    with pytest.raises(LoopFault, match=r"never retrieved.*lost"):
        run_test(kind, body)


@every_loop
def test_a_callback_that_raises_fails_the_test(kind: str) -> None:
    async def body() -> None:
        asyncio.get_running_loop().call_soon(functools.partial(int, "seven"))
        await asyncio.sleep(0.01)

    with pytest.raises(LoopFault, match="seven"):
        run_test(kind, body)


@every_loop
def test_a_task_left_running_fails_the_test(kind: str) -> None:
    async def body() -> None:
        kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(3600), name="forgotten"))

    kept: list[asyncio.Task[None]] = []
    with pytest.raises(LoopFault, match="forgotten"):
        run_test(kind, body)


@every_loop
def test_a_task_that_is_about_to_end_is_no_leak(kind: str) -> None:
    async def body() -> None:
        kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(0.02)))

    kept: list[asyncio.Task[None]] = []
    run_test(kind, body)
    assert kept[0].done()
    assert not kept[0].cancelled()


@pytest.mark.parametrize("kind", [*ASYNCIO_KINDS, "trio"])
def test_a_test_that_hangs_is_ended(kind: str) -> None:
    async def body() -> None:
        import anyio

        await anyio.sleep_forever()

    with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
        run_test(kind, body, timeout=0.05)


def test_a_timeout_of_the_test_itself_is_not_mistaken_for_a_hang() -> None:
    async def body() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        run_test("asyncio", body)


@every_loop
def test_computing_on_the_loop_is_found_and_waiting_is_not(kind: str) -> None:
    async def compute() -> None:
        _burn(0.03)

    async def wait() -> None:
        time.sleep(0.03)  # noqa: ASYNC251 - what other programs on this machine look like to the loop

    assert _slow_callbacks(kind, compute) == 1
    assert _slow_callbacks(kind, wait) == 0


@every_loop
def test_computing_handed_over_by_a_thread_is_found(kind: str) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def deliver() -> None:
            _burn(0.03)
            done.set()

        threading.Thread(target=loop.call_soon_threadsafe, args=(deliver,)).start()
        await done.wait()

    assert _slow_callbacks(kind, body) == 1


def test_garbage_collection_on_the_loop_is_not_blamed_on_the_callback() -> None:
    async def body() -> None:
        with LoopGuard() as guard:
            loop = asyncio.get_running_loop()
            done = loop.create_future()
            loop.call_soon(collect, done)
            before = time.thread_time()
            await done
            spent.append((time.thread_time() - before, guard.worst))

    def collect(done: asyncio.Future[None]) -> None:
        while time.thread_time() < limit:
            gc.collect()
        done.set_result(None)

    spent: list[tuple[float, float]] = []
    limit = time.thread_time() + 0.2
    run_test("asyncio", body)
    total, blamed = spent[0]
    assert blamed < total / 2


def test_a_blocking_call_of_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockbuster import BlockingError

    import cbengine

    # Code counts as ours by the file that it was compiled from.
    folder = cbengine.__path__[0]
    namespace: dict[str, Any] = {}
    exec(compile("def wait(event): event.wait(0.05)", f"{folder}/invented.py", "exec"), namespace)

    async def body() -> None:
        threading.Event().wait(0.001)  # not ours
        namespace["wait"](threading.Event())

    with pytest.raises(BlockingError, match="acquire"):
        run_test("asyncio", body)
    run_test("asyncio", body, guard=False)


def test_a_thread_left_running_is_found() -> None:
    before = engine_threads()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="cbengine-forgotten")
    thread.start()
    try:
        assert find_leaks(before, timeout=0.01) == ["thread cbengine-forgotten is alive"]
        assert find_leaks(engine_threads(), timeout=0.01) == []
    finally:
        end.set()
        thread.join()
    assert find_leaks(before) == []


def test_what_an_engine_holds_is_found_and_waited_for() -> None:
    engine = _Holding(pages_used=3)
    with pytest.raises(AssertionError, match="pages_used=3"):
        assert_idle(engine, timeout=0.01)
    with watched("shared", lambda: ["pages_used=3"]):
        assert find_leaks(engine_threads(), timeout=0.01) == ["shared: pages_used=3"]
    timer = threading.Timer(0.02, engine.release)
    timer.start()
    assert_idle(engine)
    timer.join()


@aio(trio=True)
async def test_idle_waits_on_any_loop() -> None:
    engine = _Holding(labels=1)
    with pytest.raises(AssertionError, match="labels=1"):
        await idle(engine, timeout=0.01)
    timer = threading.Timer(0.02, engine.release)
    timer.start()
    await idle(engine)
    with pytest.raises(AssertionError, match="the moon"):
        await eventually(lambda: False, timeout=0.01, what="the moon")
    await eventually(lambda: not timer.is_alive())


class _Holding:
    """Looks like an engine that holds something until `release()`."""

    def __init__(self, **held: int) -> None:
        self._held = dict.fromkeys(("running", "waiting", "pages_used", "rows_used", "labels"), 0) | held

    def release(self) -> None:
        self._held = dict.fromkeys(self._held, 0)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(**self._held)


async def _raise(error: Exception) -> None:
    raise error


def _burn(seconds: float) -> None:
    """Use this much CPU time of the calling thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _slow_callbacks(kind: str, body: TestBody) -> int:
    """How many callbacks a `LoopGuard` complains about when `body` runs."""
    with LoopGuard() as guard:
        run_test(kind, body)
    assert guard.calls > 0
    if guard.slow:
        with pytest.raises(AssertionError, match="blocked the event loop"):
            guard.check()
    return len(guard.slow)
