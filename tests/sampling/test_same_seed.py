"""E2. Same seed, same tokens: alone, in any crowd, preempted or not, with a prefix hit or without."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, SamplingParams
from cbengine.testing import FakeModel

ROOMY: dict[str, Any] = {"page_size": 4, "num_blocks": 300, "max_batch_tokens": 64, "max_requests_per_batch": 16}
TIGHT: dict[str, Any] = {**ROOMY, "num_blocks": 14, "safety_margin": 0.0}


def params(seed: int) -> SamplingParams:
    """Of every kind, with and without filters and penalties."""
    rng = random.Random(seed)
    return SamplingParams(
        temperature=rng.choice([0.6, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 3]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=seed,
        max_new_tokens=24,
        ignore_eos=True,
    )


async def alone(engine: AsyncEngine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [(await engine.generate(prompt, params(seed))).token_ids for seed, prompt in enumerate(prompts)]


async def crowd(engine: AsyncEngine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    streams = [engine.stream(prompt, params(seed)) for seed, prompt in enumerate(prompts)]
    return [(await stream.result()).token_ids for stream in streams]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_the_toy_model(asynchronous: bool) -> None:
    prompts = [[(3 * i + j) % 90 + 1 for j in range(9)] for i in range(8)]

    async def main() -> None:
        async with AsyncEngine(FakeModel(), use_async_batching=asynchronous, **ROOMY) as engine:
            first = await alone(engine, prompts)
            assert len(set(first)) == len(first)
            before = torch.random.get_rng_state()
            again = await alone(engine, prompts)
            assert engine.stats().cached_tokens > 0  # the prompts' first blocks were not computed again
            assert again == first == await crowd(engine, prompts)
            assert torch.equal(torch.random.get_rng_state(), before)
        async with AsyncEngine(FakeModel(), use_async_batching=asynchronous, **TIGHT) as engine:
            assert await crowd(engine, prompts) == first
            assert engine.stats().preemptions > 0

    asyncio.run(main())


@pytest.mark.timeout(240)
def test_on_smollm2(smollm2: Path) -> None:
    prompts = [[504, 3575, 282, 4649, 314, 260, 1165, 23588, i, i + 1] for i in range(100, 104)]

    async def main() -> None:
        async with AsyncEngine(str(smollm2), page_size=4, num_blocks=20, safety_margin=0.0) as engine:
            first = await alone(engine, prompts[:1])
            assert (await crowd(engine, prompts))[:1] == first
            assert engine.stats().preemptions > 0 and engine.stats().cached_tokens > 0

    asyncio.run(main())
