"""Many streams at once of which a third leaves at random moments: nothing is left over and the others' answers stand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from cbengine import AsyncEngine, FinishReason, TokenStream
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, prompt, running
from tests.api.real import TEXTS
from tests.support.leaks import idle
from tests.support.loops import aio, eventually
from tests.support.models import Reference


class Crowd:
    """Clients of one engine. Each reads its stream; some leave, each in a way and at a moment drawn by lot."""

    def __init__(self, engine: AsyncEngine, seed: int, leaving: float) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._leaving = leaving
        self.left: dict[int, list[int]] = {}
        self.stayed: dict[int, list[int]] = {}

    async def run(self, asks: list[Callable[[], TokenStream]], last_token: int) -> None:
        """Every ask is a client. Those that leave do so before their token `last_token`."""
        rng = self._rng
        async with anyio.create_task_group() as group:
            for number, ask in enumerate(asks):
                if rng.random() < self._leaving:
                    way = rng.choice((self._break, self._cancel, self._close, self._timeout, self._abandon))
                    group.start_soon(self._leave, number, ask, way, rng.randrange(last_token), rng.random() / 50)
                else:
                    group.start_soon(self._stay, number, ask)
                if rng.random() < 0.3:
                    await anyio.sleep(rng.random() / 500)

    async def _stay(self, number: int, ask: Callable[[], TokenStream]) -> None:
        self.stayed[number] = [token.id async for token in ask()]

    async def _leave(self, number: int, ask: Any, way: Any, tokens: int, patience: float) -> None:
        seen: list[int] = []
        self.left[number] = seen
        await way(ask(), seen, tokens, patience)

    async def _break(self, stream: TokenStream, seen: list[int], tokens: int, _: float) -> None:
        async for token in stream:
            seen.append(token.id)
            if len(seen) > tokens:
                break

    async def _cancel(self, stream: TokenStream, seen: list[int], tokens: int, _: float) -> None:
        async for token in stream:
            seen.append(token.id)
            if len(seen) > tokens:
                stream.cancel()
        assert stream.finish_reason is not None

    async def _close(self, stream: TokenStream, seen: list[int], tokens: int, _: float) -> None:
        async with stream:
            async for token in stream:
                seen.append(token.id)
                if len(seen) > tokens:
                    break
        assert stream.status.ended

    async def _timeout(self, stream: TokenStream, seen: list[int], _: int, patience: float) -> None:
        with anyio.move_on_after(patience):
            async for token in stream:
                seen.append(token.id)

    async def _abandon(self, stream: TokenStream, seen: list[int], _: int, patience: float) -> None:
        """Never reads."""
        await anyio.sleep(patience)
        seen.extend(stream.token_ids)


@aio(trio=True)
@pytest.mark.parametrize(("seed", "blocks"), [(0, 600), (1, 60)], ids=["room for all", "room for few"])
async def test_two_hundred_streams_of_which_a_third_leaves(seed: int, blocks: int) -> None:
    model = FakeModel()
    prompts = [prompt(1 + n % 37, n) for n in range(200)]
    async with running(model, num_blocks=blocks, max_batch_tokens=128, max_requests_per_batch=64) as engine:
        crowd = Crowd(engine, seed, leaving=1 / 3)
        asks = [
            lambda n=n: engine.stream(prompts[n], max_new_tokens=12, ignore_eos=True, request_id=f"client {n}")
            for n in range(200)
        ]
        await crowd.run(asks, last_token=12)
        await idle(engine)
        stats = engine.stats()
        assert stats.requests_finished + stats.requests_cancelled == 200 and stats.requests_failed == 0
        assert stats.requests_cancelled > 10 and len(crowd.stayed) > 100
        _check(crowd, [model.reference(p, 12, ignore_eos=True) for p in prompts])
        # Every label is free again.
        again = await engine.generate_batch(prompts[:5], max_new_tokens=3, ignore_eos=True)
        assert [c.token_ids for c in again] == [tuple(model.reference(p, 3, ignore_eos=True)) for p in prompts[:5]]


def _commands_waiting(engine: AsyncEngine) -> int:
    assert engine._worker is not None
    return engine._worker.inbox._queue.qsize()


def _check(crowd: Crowd, expected: list[list[int]]) -> None:
    assert {number: expected[number] for number in crowd.stayed} == crowd.stayed
    for number, seen in crowd.left.items():
        assert seen == expected[number][: len(seen)]


@aio(trio=True)
async def test_who_was_cut_off_may_come_back_at_once_under_the_same_label() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model, num_blocks=300, max_batch_tokens=64, max_requests_per_batch=40) as engine:
        answers: dict[int, tuple[int, ...]] = {}

        async def client(number: int) -> None:
            answer = await engine.generate(
                prompt(6, number), max_new_tokens=8, ignore_eos=True, request_id=f"c{number}"
            )
            answers[number] = answer.token_ids

        for attempt in range(3):
            gate.close()
            async with anyio.create_task_group() as group:
                for number in range(40):
                    group.start_soon(client, number)
                await eventually(lambda: engine.stats().labels == 40)
                await gate.steps(attempt + 2)
                await eventually(lambda: engine.stats().steps == gate.arrived + 1)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    # The engine thread stands still at the gate, so this is the number of those who have left by now.
                    await eventually(lambda: _commands_waiting(engine) == 40)
                gate.open()
        stats = engine.stats()
        assert answers == {} and stats.requests_cancelled == 120 and stats.labels == 0
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(client, number)
    assert answers == {n: tuple(model.reference(prompt(6, n), 8, ignore_eos=True)) for n in range(40)}


@aio("uvloop")
async def test_streams_of_a_real_model_of_which_a_third_leaves(
    real_engine: AsyncEngine, reference_generate: Reference, encode: Any
) -> None:
    before = real_engine.stats()
    prompts: list[list[int]] = [encode(text) for text in TEXTS * 3]
    crowd = Crowd(real_engine, 5, leaving=1 / 3)
    await crowd.run(
        [lambda p=p: real_engine.stream(p, max_new_tokens=5, temperature=0, ignore_eos=True) for p in prompts],
        last_token=4,
    )
    await idle(real_engine)
    stats = real_engine.stats()
    assert stats.requests_cancelled - before.requests_cancelled >= 3
    assert len(crowd.stayed) >= 12
    _check(crowd, [reference_generate(ids, 5, ignore_eos=True) for ids in prompts])


@aio("asyncio")
async def test_leaving_a_real_model_in_the_middle_of_a_prompt_and_of_a_step(
    real_engine: AsyncEngine, reference_generate: Reference, encode: Any
) -> None:
    stays = real_engine.stream(TEXTS[2], max_new_tokens=6, temperature=0, ignore_eos=True)
    long = real_engine.stream(encode("word " * 200), max_new_tokens=50, request_id="again")
    await stays.__anext__()  # 200 tokens in steps of 64: the long prompt is being computed
    await long.aclose()
    assert long.finish_reason is FinishReason.CANCELLED and long.token_ids == ()
    short = real_engine.stream(TEXTS[3], max_new_tokens=50, temperature=0, request_id="again")
    await short.__anext__()
    with anyio.move_on_after(0.001):
        await short.result()
    assert [token.id async for token in stays] == reference_generate(encode(TEXTS[2]), 6, ignore_eos=True)[1:]
    await idle(real_engine)
