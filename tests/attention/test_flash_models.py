"""Greedy tokens of whole models through the real calls of the flash backends equal those of transformers' `generate`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, EngineStats
from cbengine.attention import AttentionSettings
from cbengine.errors import UnsupportedFeatureError
from cbengine.models.adapter import TransformersRunner
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import tiny
from tests.support.flash_double import HALF, FlashDouble, install

NEW = 8
LENGTHS = [1, 5, 30, 12]
HYBRID = "gemma3-text"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> FlashDouble:
    return install(monkeypatch, dtypes=(*HALF, torch.float32), page_multiple=4)


def serve(model: Any, prompts: list[list[int]], new: int, **settings: Any) -> tuple[list[list[int]], EngineStats]:
    """Greedy answers to all prompts at once, and the counts at the end."""

    async def run() -> tuple[list[list[int]], EngineStats]:
        async with AsyncEngine(model, **settings) as engine:
            answers = await engine.generate_batch(prompts, max_new_tokens=new, temperature=0.0, ignore_eos=True)
            return [list(answer.token_ids) for answer in answers], engine.stats()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *[("flash2", name) for name in ("llama", "mistral-window", "gemma2")],
        *[("flash3", name) for name in ("llama-mha", "mistral-window", HYBRID)],
        *[("torch", name) for name in ("llama", HYBRID)],
    ],
)
def test_tokens_equal_generate(double: FlashDouble, backend: str, name: str) -> None:
    """Packed, chunked, mixed and padded steps: full attention, windows, hybrids, a soft cap."""
    model = tiny(name)
    prompts = prompts_of(LENGTHS, seed=1)
    expected = [reference(model, prompt, NEW)[0] for prompt in prompts]
    served = Paged(TransformersRunner(model, attention=backend), page_size=4).generate(prompts, NEW)
    assert [sequence.tokens for sequence in served] == expected
    kinds = {name.split(".")[1] for name in double.names()}
    assert kinds == {"flash2": {"varlen", "kvcache"}, "flash3": {"packed", "kvcache"}, "torch": {"varlen"}}[backend]


@pytest.mark.parametrize("backend", ["flash2", "flash3"])
def test_engine_with_both_attention_types(double: FlashDouble, backend: str) -> None:
    """Two slots; a pool that is too small, so that requests are preempted; a prompt that takes several steps."""
    model = tiny(HYBRID)
    prompts = prompts_of([40, 9, 17, 3, 26], seed=3)
    expected = [reference(model, prompt, 12)[0][len(prompt) :] for prompt in prompts]
    answers, stats = serve(
        model, prompts, 12, attention_backend=backend, page_size=4, num_blocks=16, max_batch_tokens=16, safety_margin=0.0
    )  # fmt: skip
    assert answers == expected
    assert stats.preemptions
    fast = [arguments for name, arguments in double.calls if name == f"{backend}.kvcache"]
    # Full and sliding layers alike, and the window is told where somebody has passed it.
    assert {arguments["window_size"] for arguments in fast} == {(-1, -1), (7, 0)}


@pytest.mark.parametrize("backend", ["flash2", "flash3", "torch"])
def test_engine_with_a_prefix_cache(double: FlashDouble, backend: str) -> None:
    """Pages that several requests share are read by all, and written by none."""
    model = tiny("llama")
    common = prompts_of([24], seed=4)[0]
    prompts = [common + tail for tail in prompts_of([3, 9, 5], seed=5)]
    expected = [reference(model, prompt, NEW)[0][len(prompt) :] for prompt in prompts]

    async def run() -> list[list[int]]:
        async with AsyncEngine(model, attention_backend=backend, page_size=8, num_blocks=40) as engine:
            options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
            first = await engine.generate(prompts[0], **options)
            rest = await engine.generate_batch(prompts[1:], **options)
            assert engine.stats().cached_tokens >= 2 * 24
            return [list(answer.token_ids) for answer in (first, *rest)]

    assert asyncio.run(run()) == expected


def test_pages_of_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2's own: the engine finds the page size, and sequences over several such pages are right."""
    double = install(monkeypatch, dtypes=(torch.float32,))
    model = tiny("llama")
    model.config.max_position_embeddings = 1024
    prompts = prompts_of([520, 250], seed=6)
    expected = [reference(model, prompt, NEW)[0][len(prompt) :] for prompt in prompts]

    async def run() -> list[list[int]]:
        async with AsyncEngine(model, attention_backend="flash2", num_blocks=8) as engine:
            answers = await engine.generate_batch(prompts, max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
            assert engine.config.page_size == 256
            return [list(answer.token_ids) for answer in answers]

    assert asyncio.run(run()) == expected
    assert set(double.names()) == {"flash2.varlen", "flash2.kvcache"}


def test_a_chosen_page_size_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, dtypes=(torch.float32,))

    async def run() -> None:
        async with AsyncEngine(tiny("llama"), attention_backend="flash2", page_size=16):
            raise AssertionError

    with pytest.raises(UnsupportedFeatureError, match=r"multiple of 256 tokens, not of 16: leave page_size out"):
        asyncio.run(run())


def test_requests_wider_than_the_fast_path(double: FlashDouble) -> None:
    """Two pages of four tokens: answers begin on the fast path, and go on as packed steps."""
    model = tiny("llama")
    prompts = prompts_of([3, 5], seed=7)
    expected = [reference(model, prompt, NEW)[0] for prompt in prompts]
    settings = AttentionSettings("flash2", max_blocks_per_request=2)
    served = Paged(TransformersRunner(model, attention=settings), page_size=4).generate(prompts, NEW)
    assert [sequence.tokens for sequence in served] == expected
    assert double.names().count("flash2.kvcache") >= 2
    assert double.names()[-1] == "flash2.varlen"


def test_sinks_are_refused_by_name_and_served_otherwise(double: FlashDouble) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"has no attention sinks; use one of cpu, eager, sdpa"):
        TransformersRunner(tiny("gpt-oss"), attention="flash3")
    with pytest.raises(UnsupportedFeatureError, match="has no soft cap"):
        TransformersRunner(tiny("gemma2"), attention="torch")
