"""A reader that takes 50 ms for each token, beside fast ones: what it costs them, and what it keeps and loses itself."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from cbengine import AsyncEngine, FinishReason, RequestFailedError, TokenStream
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel
from tests.support.leaks import idle
from tests.support.loops import aio, eventually

FAST, LONG, ROOM = 6, 50, 4


class Steps:
    """A model's `fault` that only looks on: how many sequences each step has computed."""

    def __init__(self) -> None:
        self.sequences: list[int] = []

    def __call__(self, inputs: StepInputs) -> None:
        self.sequences.append(inputs.num_seqs)


class SlowReader:
    """Reads one token in 50 ms until `hurry` is set. `most` is the largest number of tokens that lay unread."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.got: list[int] = []
        self.most = 0
        self.hurry = anyio.Event()

    async def read(self) -> None:
        async for token in self.stream:
            self.got.append(token.id)
            self.most = max(self.most, len(self.stream.token_ids) - len(self.got))
            with anyio.move_on_after(0.05):
                await self.hurry.wait()


@aio("asyncio")
@pytest.mark.parametrize("policy", [None, "buffer", "pause", "abort"])
async def test_beside_fast_readers(policy: str | None) -> None:
    """The fast ones get a token from every step, as they do without it: `LONG` steps, one after the other."""
    steps = Steps()
    model = FakeModel(eos_token_ids=(), delay=0.002, fault=steps)
    settings: dict[str, Any] = {
        "page_size": 4,
        "num_blocks": 400,
        "max_batch_tokens": 64,
        "max_requests_per_batch": FAST + 1,
    }
    async with AsyncEngine(model, **settings) as engine, anyio.create_task_group() as group:
        slow = None
        async with engine.paused():  # all of them join the same step
            fast = [engine.stream([i, 6, 7], max_new_tokens=LONG) for i in range(1, FAST + 1)]
            if policy is not None:
                stream = engine.stream([9, 9], max_new_tokens=LONG, backpressure=policy, stream_buffer=ROOM)
                slow = SlowReader(stream)
                group.start_soon(read_to_its_end, slow, policy)
        for i, stream in enumerate(fast, 1):
            assert list((await stream.result()).token_ids) == model.reference([i, 6, 7], LONG)
        full = [at for at, sequences in enumerate(steps.sequences) if sequences >= FAST]
        assert full == list(range(full[0], full[0] + LONG))
        if slow is None:
            return
        if policy == "buffer":
            await eventually(lambda: slow.stream.finish_reason is not None)
            assert len(slow.got) < LONG
            await idle(engine)  # it holds no page, though most of it is unread
        slow.hurry.set()
        await eventually(lambda: slow.stream.finish_reason is not None and len(slow.got) == len(slow.stream.token_ids))
        assert slow.most <= (LONG if policy == "buffer" else ROOM + 2)  # two steps were in flight
        assert slow.got == model.reference([9, 9], LONG)[: len(slow.got)]
        assert len(slow.got) >= ROOM if policy == "abort" else len(slow.got) == LONG
        await idle(engine)


async def read_to_its_end(reader: SlowReader, policy: str) -> None:
    if policy == "abort":
        with pytest.raises(RequestFailedError, match="unread"):
            await reader.read()
        assert reader.stream.finish_reason == FinishReason.ERROR
    else:
        await reader.read()
        assert reader.stream.finish_reason == FinishReason.LENGTH
