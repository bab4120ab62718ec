"""A stream that is left at a chosen step, beside one that stays: with the device held at a gate, so that steps count."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from cbengine import AsyncEngine, FinishReason, TokenStream
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, prompt, running
from tests.support.leaks import idle
from tests.support.loops import eventually

STAYS = prompt(4, 1)
LEAVES = prompt(20)  # beside one that decodes, in steps of 8 tokens: three chunks
STAYS_FOR, LEAVES_FOR = 20, 6
OFFSETS = range(12)
"""Steps from the call until it is left: in the inbox (0), mid-prefill (1 to 3), at each token, when it has ended."""
SETTINGS = {"max_batch_tokens": 8, "max_requests_per_batch": 2, "num_blocks": 64}


@dataclass
class Leaver:
    """The client that is about to leave."""

    stream: TokenStream
    seen: list[int] = field(default_factory=list)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def read(self) -> None:
        """Read until the end, in a scope of its own."""
        try:
            with self.scope:
                async for token in self.stream:
                    self.seen.append(token.id)
        finally:
            self.ended.set()


Way = Callable[[Leaver], Coroutine[Any, Any, None]]


@asynccontextmanager
async def gated() -> AsyncGenerator[tuple[AsyncEngine, FakeModel, Gate]]:
    """An engine whose steps have to be let through."""
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model, **SETTINGS) as engine:
        yield engine, model, gate


async def leave_at(offset: int, way: Way, *, read: bool = True, keep: bool = True) -> None:
    """Leave after `offset` steps by `way(leaver)`; everything of the leaver must be back within two steps.

    Args:
        read: a task reads the stream meanwhile, and so waits in `__anext__`.
        keep: False if `way` drops the stream.
    """
    async with gated() as (engine, model, gate):
        stays = engine.stream(STAYS, max_new_tokens=STAYS_FOR, ignore_eos=True)
        await gate.someone_waits()
        leaver = Leaver(engine.stream(LEAVES, max_new_tokens=LEAVES_FOR, ignore_eos=True, request_id="leaver"))
        stream = leaver.stream if keep else None
        finished: FinishReason | None = None
        again: list[TokenStream] = []
        expected = model.reference(LEAVES, LEAVES_FOR, ignore_eos=True)
        async with anyio.create_task_group() as group:
            if read:
                group.start_soon(leaver.read)
            await gate.steps(offset)
            # With the next step launched as well, the engine has handed over all of the step before the one at the gate.
            await eventually(lambda: engine.stats().steps == gate.arrived + 1)
            await anyio.sleep(0.001)
            finished = leaver.stream.finish_reason
            if stream is None:
                await way(leaver)
            else:
                group.start_soon(way, leaver)
                await eventually(lambda: stream.finish_reason is not None)
            gate.let_pass(2)
            await eventually(lambda: _only_one_left(engine), what=f"everything back two steps after step {offset}")
            # The label is free, while its neighbour is still at it.
            again.append(engine.stream(LEAVES, max_new_tokens=LEAVES_FOR, ignore_eos=True, request_id="leaver"))
            gate.open()
        assert (await stays.result()).token_ids == tuple(model.reference(STAYS, STAYS_FOR, ignore_eos=True))
        assert (await again[0].result()).token_ids == tuple(expected)
        if stream is not None:
            _check_left(stream, leaver.seen, expected, finished)
        await idle(engine)
        stats = engine.stats()
        assert stats.requests_finished + stats.requests_cancelled == 3 and stats.requests_failed == 0


def _only_one_left(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    # The one that stays holds pages of 4 for its prompt, its tokens so far and up to two in flight.
    return (stats.rows_used, stats.labels, stats.running, stats.waiting) == (1, 1, 1, 0) and stats.pages_used <= 6


def _check_left(stream: TokenStream, seen: list[int], expected: list[int], finished: FinishReason | None) -> None:
    if finished is None:
        assert stream.finish_reason is FinishReason.CANCELLED and stream.status.ended
    else:
        assert stream.finish_reason is finished is FinishReason.LENGTH
        assert list(stream.token_ids) == expected
    assert seen == expected[: len(seen)]
    assert list(stream.token_ids) == expected[: len(stream.token_ids)]
    assert len(stream.text_so_far) == len(stream.token_ids) == stream.usage.completion_tokens >= len(seen)
