"""Engines over the small models of `networks`, for tests that are no coroutines themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from cbengine import AsyncEngine, EngineConfig, EngineStats
from cbengine.execution.build import Built
from tests.gpu.card import Card

SECONDS = 100.0


def engine_for(model: Any, card: Card, **settings: Any) -> AsyncEngine:
    """Not started. Sizes are small unless `settings` say otherwise."""
    sizes = {
        "num_blocks": card.size(96, 48),
        "max_batch_tokens": card.size(512, 32),
        "max_requests_per_batch": card.size(32, 4),
        "max_model_len": card.size(2048, 128),
        "safety_margin": 0.0,
    }
    return AsyncEngine(model, config=EngineConfig(**{**sizes, **settings}))


def built(engine: AsyncEngine) -> Built:
    """The inside of an engine that runs."""
    worker = engine._worker
    assert worker is not None and worker.built is not None
    return worker.built


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it, within a time that says that something hangs."""
    return asyncio.run(_limited(coroutine))


async def _limited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(coroutine, SECONDS)


async def ask(engine: AsyncEngine, prompts: Sequence[Sequence[int]], new: int, **params: Any) -> list[list[int]]:
    """The answers to all prompts, greedy unless `params` say otherwise. All are there before the first step is made."""
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    async with engine.paused():
        streams = [engine.stream(list(prompt), max_new_tokens=new, **params) for prompt in prompts]
    return [list((await stream.result()).token_ids) for stream in streams]


def answers(
    model: Any, card: Card, prompts: Sequence[Sequence[int]], new: int, **settings: Any
) -> tuple[list[list[int]], EngineStats]:
    """The greedy answers of an engine of these settings, and its statistics before it was closed."""

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with engine_for(model, card, **settings) as engine:
            return await ask(engine, prompts, new), engine.stats()

    return run(main())


async def until_idle(engine: AsyncEngine) -> EngineStats:
    """Wait until nothing is alive or in flight any more; then all pages are back."""
    for _ in range(2000):
        stats = engine.stats()
        if not (stats.running or stats.waiting or stats.steps_in_flight or stats.rows_used or stats.pages_used):
            break
        await asyncio.sleep(0.01)
    stats = engine.stats()
    left = (stats.running, stats.waiting, stats.rows_used, stats.labels, stats.pages_used, stats.steps_in_flight)
    assert left == (0,) * 6, f"left over (running, waiting, rows, labels, pages, steps): {left}"
    assert stats.pages_free + stats.pages_cached + stats.pages_reserved == stats.pages_total
    return stats
