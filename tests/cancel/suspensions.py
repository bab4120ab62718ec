"""Cancel a coroutine at its k-th suspension, on asyncio (uvloop, eager tasks) and on trio, the way the loop itself does."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import anyio

Life = Coroutine[Any, Any, None]


class Swallowed(AssertionError):
    """The coroutine was cancelled and went on as if nothing had happened."""


@types.coroutine
def _watched(
    coroutine: Life, on_suspend: Callable[[Any], None], on_resume: Callable[[], None]
) -> Generator[Any, Any, None]:
    """Run `coroutine` and hear of each of its suspensions (with what it yields to the loop) and resumptions."""
    # What to do next is popped, so that no variable of this frame refers to an exception whose traceback refers to it:
    # such a cycle would keep the client's own variables alive until the garbage collector comes.
    todo: list[Callable[[], Any]] = [partial(coroutine.send, None)]
    while True:
        try:
            waits_for = todo.pop()()
        except StopIteration:
            return
        on_suspend(waits_for)
        try:
            value = yield waits_for
        except BaseException as error:
            todo.append(partial(coroutine.throw, error))
        else:
            todo.append(partial(coroutine.send, value))
            del value
        on_resume()


async def cancelled_at(k: int, life: Life, moment: str, loop_kind: str) -> bool:
    """Run `life`, cancel it at its k-th suspension, and return True; False if it ended before.

    Args:
        moment: "waiting": while it waits. "woken": when what it waits for has come and it has not run yet (asyncio), or
            just before it runs on, to be told at its next checkpoint (trio).

    Raises:
        Swallowed: it was cancelled and did not end with the cancellation (asyncio).
    """
    if loop_kind == "trio":
        return await _trio(k, life, moment)
    return await _asyncio(k, life, moment)


async def _asyncio(k: int, life: Life, moment: str) -> bool:
    count = 0
    reached = False

    def on_suspend(waits_for: Any) -> None:
        nonlocal count, reached
        if count == k:
            reached = True
            task = asyncio.current_task()
            assert task is not None
            if moment == "woken" and waits_for is not None:
                # Before the task's own callback, which is added when it yields.
                waits_for.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        count += 1

    async def run() -> None:
        await _watched(life, on_suspend, lambda: None)

    task = asyncio.get_running_loop().create_task(run())
    await asyncio.wait([task])
    if not reached:
        task.result()
        return False
    if not task.cancelled():
        raise Swallowed(f"cancelled at suspension {k}, it ended with {task.exception()!r}")
    return True


async def _trio(k: int, life: Life, moment: str) -> bool:
    # A cancelled scope of trio raises at every checkpoint from then on: there is nothing that could be swallowed for good.
    count = 0
    with anyio.CancelScope() as scope:

        def on_suspend(_: Any) -> None:
            nonlocal count
            if count == k and moment == "waiting":
                scope.cancel()
            count += 1

        def on_resume() -> None:
            if count == k + 1 and moment == "woken":
                scope.cancel()

        await _watched(life, on_suspend, on_resume)
    return count > k
