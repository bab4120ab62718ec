"""SmolLM2 for the tests that show something on a real model: loaded once, in an engine of its own for each module.

A module gets the fixture by importing it in its folder's `conftest.py`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbengine import AsyncEngine, PromptTooLongError
from tests.support.leaks import busy_fields, watched

SETTINGS: dict[str, Any] = {"page_size": 16, "num_blocks": 128, "max_batch_tokens": 64, "max_requests_per_batch": 32}

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at",
    "My favourite season is autumn, because",
    "In 1969, the first human being",
    "A short poem about rain:",
)
"""Prompts whose greedy answers differ."""


@functools.cache
def _loaded(folder: Path) -> Any:
    from cbengine.models.load import load

    return load(folder)


@pytest.fixture(scope="session")
def real_model(smollm2: Path) -> Any:
    """SmolLM2's `runner` and `tokenizer`, for one engine at a time: not beside `real_engine`."""
    return _loaded(smollm2)


@pytest.fixture(scope="module")
def real_engine(real_model: Any) -> Iterator[AsyncEngine]:
    """A running engine over SmolLM2; every test has to leave it idle."""
    engine = AsyncEngine(real_model.runner, tokenizer=real_model.tokenizer, **SETTINGS)
    asyncio.run(_start(engine))
    with watched("real engine", lambda: busy_fields(engine)):
        yield engine
    asyncio.run(engine.aclose())


async def _start(engine: AsyncEngine) -> None:
    await engine.start()
    # The thread that tokenizes long texts starts with the first of them and lives as long as the engine: no leak.
    with pytest.raises(PromptTooLongError):
        await engine.generate("word " * 3000)


@pytest.fixture(scope="session")
def encode(hf_model: Any, smollm2: Path) -> Any:
    """`encode(text)`: the ids that transformers gives to the reference."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return lambda text: tokenizer(text)["input_ids"]
