"""Readers that leave, at random: everything comes back, and who stays notices nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cbengine import AsyncEngine, FinishReason
from tests.gpu import networks
from tests.gpu.card import Card
from tests.gpu.serving import answers, built, engine_for, run, until_idle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_two_hundred_streams_with_random_cancels(card: Card, asynchronous: bool) -> None:
    model: Any = networks.network("gemma3", card)
    rng = random.Random(7)
    count, new = card.size(200, 12), card.size(40, 5)
    prompts = networks.prompts(card, [rng.randrange(1, card.size(300, 20)) for _ in range(count)])
    leaves = [rng.choice([None, None, 0, rng.randrange(1, new)]) for _ in prompts]
    stay = [i for i, leave in enumerate(leaves) if leave is None]
    settings: dict[str, Any] = {"use_async_batching": asynchronous, "num_blocks": card.size(160, 40)}

    async def read(engine: AsyncEngine, i: int) -> tuple[list[int], FinishReason]:
        stream = engine.stream(prompts[i], max_new_tokens=new, temperature=0.0, ignore_eos=True)
        if leaves[i] == 0:
            await asyncio.sleep(rng.random() * 0.05)
            stream.cancel()
        async for token in stream:
            if token.index + 1 == leaves[i]:
                stream.cancel()
        done = await stream.result()
        return list(done.token_ids), done.finish_reason

    async def main() -> list[Any]:
        async with engine_for(model, card, **settings) as engine:
            done = await asyncio.gather(*(read(engine, i) for i in range(count)))
            stats = await until_idle(engine)
            assert stats.requests_finished + stats.requests_cancelled == count and not stats.requests_failed
            assert stats.requests_cancelled > count // 8
            return done

    done = run(main())
    assert all(done[i][1] is FinishReason.LENGTH and len(done[i][0]) == new for i in stay)
    expected, _ = answers(model, card, [prompts[i] for i in stay[:8]], new, **settings)
    networks.assert_same(model, [prompts[i] for i in stay[:8]], [done[i][0] for i in stay[:8]], expected)


def test_a_generator_that_is_closed_midway(card: Card) -> None:
    """A user's own async generator over a stream; its `aclose` ends the work."""
    model: Any = networks.network("llama", card)
    prompt = networks.prompts(card, [30])[0]

    async def tokens(engine: AsyncEngine) -> AsyncIterator[int]:
        async with engine.stream(
            prompt, max_new_tokens=card.size(1500, 90), temperature=0.0, ignore_eos=True
        ) as stream:
            async for token in stream:
                yield token.id

    async def main() -> None:
        async with engine_for(model, card) as engine:
            generator = tokens(engine)
            first = [await anext(generator) for _ in range(3)]
            await generator.aclose()  # type: ignore[attr-defined]
            stats = await until_idle(engine)
            assert stats.requests_cancelled == 1 and stats.generated_tokens < card.size(1500, 90)
            again = await engine.generate(prompt, max_new_tokens=3, temperature=0.0, ignore_eos=True)
            assert list(again.token_ids) == first

    run(main())


def test_two_event_loops(card: Card) -> None:
    """One engine, two threads with a loop each."""
    model: Any = networks.network("qwen3", card)
    prompts, new = networks.prompts(card, [3, 20, 9, 31, 12, 7]), card.size(30, 4)
    found: dict[int, list[int]] = {}

    async def ask(engine: AsyncEngine, which: list[int]) -> None:
        streams = {i: engine.stream(prompts[i], max_new_tokens=new, temperature=0.0, ignore_eos=True) for i in which}
        for i, stream in streams.items():
            found[i] = [token.id async for token in stream]

    async def main() -> None:
        async with engine_for(model, card) as engine:
            other = threading.Thread(target=lambda: asyncio.run(ask(engine, [1, 3, 5])))
            other.start()
            await ask(engine, [0, 2, 4])
            await asyncio.to_thread(other.join)
            await until_idle(engine)

    run(main())
    expected = [networks.greedy(model, prompt, new) for prompt in prompts]
    networks.assert_same(model, prompts, [found[i] for i in range(len(prompts))], expected)


def test_the_last_device(card: Card) -> None:
    """A model on cuda:1, where there are two; its streams, buffers and kernels are there."""
    model: Any = networks.network("llama", card, device=card.last)
    prompts, new = networks.prompts(card, [3, 40, 9]), card.size(16, 3)
    expected = [networks.greedy(model, prompt, new) for prompt in prompts]

    async def main() -> list[list[int]]:
        async with engine_for(model, card, **card.graphs) as engine:
            assert built(engine).pool.device == card.last and engine.config.device == str(card.last)
            streams = [engine.stream(p, max_new_tokens=new, temperature=0.0, ignore_eos=True) for p in prompts]
            return [list((await stream.result()).token_ids) for stream in streams]

    networks.assert_same(model, prompts, run(main()), expected)
