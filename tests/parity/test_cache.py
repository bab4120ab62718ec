"""Sliding windows, hybrids and the prefix cache on real and on tiny models: tokens equal those of transformers.

A greedy answer is checked by one plain forward over prompt and answer: it is `generate`'s exactly if each of its tokens is
the most likely one after those before it.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, Completion
from cbengine.cache.geometry import CacheGeometry
from cbengine.cache.manager import longest_alone
from cbengine.models.adapter import TransformersRunner
from cbengine.models.load import load
from cbengine.observe.counters import EngineStats
from tests.models.paged import prompts_of, reference
from tests.models.tiny import SIZES, tiny

WINDOW = 512
HEAD = 500
"""Tokens; less than a window, so that transformers' cache still has all of them."""


def serve(model: Any, prompts: Sequence[list[int]], new: int, **settings: Any) -> tuple[list[Completion], EngineStats]:
    """Greedy answers to all prompts at once, and the counts at the end."""

    async def run() -> tuple[list[Completion], EngineStats]:
        async with AsyncEngine(model, **settings) as engine:
            answers = await engine.generate_batch(prompts, max_new_tokens=new, temperature=0.0, ignore_eos=True)
            return answers, engine.stats()

    return asyncio.run(run())


def most_likely(model: Any, tokens: Sequence[int], start: int) -> list[int]:
    """For each of `tokens[start:]`, the most likely token at its place."""
    begin = HEAD if start > HEAD else 0
    with torch.inference_mode():
        cache = copy.deepcopy(head(model, tuple(tokens[:begin]))) if begin else None
        # All logits of the prompt would be half a gigabyte: the vocabulary has 262,144 tokens.
        options: Any = {"use_cache": bool(begin), "logits_to_keep": len(tokens) - start + 1}
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        logits = model(input_ids=torch.tensor([list(tokens[begin:])]), **options, **{name: cache}).logits[0]
    return logits[:-1].argmax(-1).tolist()


@functools.lru_cache(maxsize=1)
def head(model: Any, tokens: tuple[int, ...]) -> Any:
    """transformers' own cache of the tokens that most prompts here begin with. Copied by who goes on from there."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values


@pytest.fixture(scope="module")
def gemma(gemma3: Path) -> Iterator[TransformersRunner]:
    """The loaded model, shared by the tests here: it is served, and asked for its own answer when no engine runs."""
    loaded = load(gemma3, with_tokenizer=False)
    assert [layer.window for layer in loaded.runner.spec.layers].count(WINDOW) == 15
    yield loaded.runner
    head.cache_clear()


@pytest.fixture(scope="module")
def long_text(gemma3: Path) -> list[int]:
    """800 tokens of ordinary text."""
    from transformers import AutoTokenizer

    text = Path(asyncio.__file__).read_text(encoding="utf-8") + Path(random.__file__).read_text(encoding="utf-8")
    return AutoTokenizer.from_pretrained(gemma3)(text)["input_ids"][:800]


def check_gemma(runner: TransformersRunner, prompts: Sequence[list[int]], answers: Sequence[Completion]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        assert list(answer.token_ids) == most_likely(runner.model, tokens, len(prompt))


@pytest.mark.timeout(240)
def test_gemma_around_its_window(gemma: TransformersRunner, long_text: list[int]) -> None:
    """Prompts just under, at and over the window, in one crowd and in pieces, decoding over the edge of the window."""
    prompts = [long_text[:n] for n in (505, 512, 520)]
    answers, stats = serve(gemma, prompts, 10, page_size=32, num_blocks=100, max_batch_tokens=150)
    check_gemma(gemma, prompts, answers)
    assert stats.preemptions == 0 and stats.cached_tokens == 0


@pytest.mark.timeout(240)
def test_gemma_far_past_its_window(gemma: TransformersRunner, long_text: list[int]) -> None:
    """Alone, 1.5 windows of prompt and some pages of answer, in less memory than full attention everywhere would take."""
    answers, _ = serve(gemma, [long_text[:760]], 36, page_size=16, num_blocks=44, max_batch_tokens=256)
    check_gemma(gemma, [long_text[:760]], answers)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "space", [pytest.param(0.0, id="recomputed", marks=pytest.mark.slow), pytest.param(0.2, id="swapped")]
)
def test_gemma_preempted(gemma: TransformersRunner, long_text: list[int], space: float) -> None:
    """Somebody has to give way, and goes on as if nothing had been."""
    prompts = [long_text[:514], long_text[100:160], long_text[300:360]]
    answers, stats = serve(
        gemma,
        prompts,
        30,
        page_size=16,
        num_blocks=42,
        max_batch_tokens=514,
        safety_margin=0.0,
        cpu_offload_space=space,
        preemption="swap",
    )
    check_gemma(gemma, prompts, answers)
    assert stats.preemptions > 0 and bool(stats.swaps) == bool(space)


@pytest.mark.timeout(240)
def test_gemma_equals_generate(gemma: TransformersRunner, long_text: list[int]) -> None:
    """Once more by transformers' own loop and cache; the prompt in one piece."""
    prompt = long_text[:508]
    answers, _ = serve(gemma, [prompt], 8, page_size=64, num_blocks=30, max_batch_tokens=1024)
    assert [*prompt, *answers[0].token_ids] == reference(gemma.model, prompt, 8)[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gemma_at_4000_tokens(gemma: TransformersRunner, long_text: list[int]) -> None:
    """In a cache that is just large enough by the geometry: three full layers keep all, fifteen their window."""
    prompt, geometry = (long_text * 5)[:3990], CacheGeometry.of(gemma.spec, 32)
    blocks = next(n for n in range(1, 200) if longest_alone(geometry, geometry.chunks_for(n), 8192) >= 4000)
    assert blocks < 40 < geometry.blocks_for(4000) // 3  # with full attention everywhere it would be 125
    answers, stats = serve(gemma, [prompt], 10, page_size=32, num_blocks=blocks, max_batch_tokens=512)
    check_gemma(gemma, [prompt], answers)
    assert stats.preemptions == 0


def test_a_window_that_the_config_changes_is_honoured() -> None:
    """As somebody does who serves a model with a shorter window than it was made with."""
    answers = {}
    for window in (4, 8, 20):
        model = tiny("mistral-window")
        for module in (model, *model.model.layers):
            config = getattr(module, "config", None)
            if config is not None:
                config.sliding_window = window
        assert {layer.window for layer in TransformersRunner(model).spec.layers} == {window}
        prompt = prompts_of([30], seed=6)[0]
        short = tiny_with_window(window)
        found, _ = serve(model, [prompt], 12, page_size=4, num_blocks=60)
        answers[window] = list(found[0].token_ids)
        assert [*prompt, *answers[window]] == reference(short, prompt, 12)[0]
    assert answers[4] != answers[20]


def tiny_with_window(window: int) -> Any:
    """The same weights, in a model that was made with this window."""
    import transformers

    original: Any = tiny("mistral-window")
    config = transformers.MistralConfig(**{**original.config.to_dict(), "sliding_window": window})
    model = transformers.MistralForCausalLM(config).float().eval()
    model.load_state_dict(original.state_dict())
    return model


# --- tiny models, where a window is 8 tokens ----------------------------------------------------------------------


def _pure_sliding() -> Any:
    """Every layer of a Qwen2 slides."""
    import transformers

    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=0)
    assert set(config.layer_types or ()) == {"sliding_attention"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return transformers.Qwen2ForCausalLM(config).float().eval()


MODELS: dict[str, Callable[[], Any]] = {
    name: functools.partial(tiny, name) for name in ("mistral-window", "gemma2", "gemma3-text", "gpt-oss")
}
MODELS["pure-sliding"] = _pure_sliding


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_with_windows(name: str, backend: str) -> None:
    """Prompts from one token to many windows, in a crowd, chunked, with answers of several windows."""
    model = MODELS[name]()
    prompts = prompts_of([1, 7, 8, 9, 45], seed=3)
    expected = [reference(model, prompt, 24)[0] for prompt in prompts]
    answers, _ = serve(model, prompts, 24, page_size=4, num_blocks=200, max_batch_tokens=16, attention_backend=backend)
    assert [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)] == expected


@pytest.mark.parametrize("space", [0.0, 0.01], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_with_windows_preempted(name: str, space: float) -> None:
    model = MODELS[name]()
    prompts = prompts_of([5, 13, 20, 3, 11], seed=4)
    expected = [reference(model, prompt, 30)[0] for prompt in prompts]
    blocks = 9 if name in ("mistral-window", "pure-sliding") else 16
    answers, stats = serve(
        model,
        prompts,
        30,
        page_size=4,
        num_blocks=blocks,
        max_batch_tokens=16,
        safety_margin=0.0,
        cpu_offload_space=space,
        preemption="swap",
    )
    assert [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)] == expected
    assert stats.preemptions > 0 and stats.swaps <= stats.preemptions and bool(stats.swaps) == bool(space)


# --- the prefix cache ---------------------------------------------------------------------------------------------


def test_the_second_request_computes_only_what_is_new(smollm2: Path) -> None:
    """A shared prefix of 600 tokens: less than two pages of the second prompt are computed."""

    async def run() -> None:
        rng = random.Random(0)
        shared = [rng.randrange(100, 40_000) for _ in range(600)]
        async with AsyncEngine(load(smollm2).runner, page_size=32, num_blocks=60, max_batch_tokens=256) as engine:
            await engine.generate([*shared, 5, 6, 7], max_new_tokens=3, temperature=0.0)
            before = engine.stats().prompt_tokens
            second = await engine.generate([*shared, 8, 9], max_new_tokens=3, temperature=0.0)
            assert engine.stats().prompt_tokens - before < 2 * 32
            assert second.usage.cached_tokens == second.metrics.cached_tokens == 576
            other = await engine.generate([*shared, 8, 9], max_new_tokens=3, temperature=0.0, cache_salt="another")
            assert other.usage.cached_tokens == 0 and other.token_ids == second.token_ids

    asyncio.run(run())


def test_prefix_cache_on_and_off_are_the_same(smollm2: Path) -> None:
    """Chats with one system prompt, several turns each, in a cache that has to evict and preempt."""
    runner = load(smollm2).runner
    rng = random.Random(1)
    system = [rng.randrange(100, 40_000) for _ in range(40)]
    turns = [[rng.randrange(100, 40_000) for _ in range(rng.randint(3, 20))] for _ in range(8)]

    async def chat(engine: AsyncEngine, turns: Sequence[list[int]]) -> list[int]:
        tokens = list(system)
        for turn in turns:
            tokens += turn
            answer = await engine.generate(tokens, max_new_tokens=6, temperature=0.0, ignore_eos=True)
            tokens += answer.token_ids
        return tokens

    async def run(sharing: bool) -> tuple[list[list[int]], EngineStats]:
        settings = {"page_size": 8, "num_blocks": 26, "max_batch_tokens": 64, "safety_margin": 0.0}
        async with AsyncEngine(runner, allow_block_sharing=sharing, **settings) as engine:
            left = engine.stream([*system, 1, 2, 3], max_new_tokens=50, temperature=0.0, ignore_eos=True)
            chats = [asyncio.create_task(chat(engine, turns[2 * i : 2 * i + 2])) for i in range(4)]
            await left.__anext__()
            left.cancel()
            return [await task for task in chats], engine.stats()

    on, stats = asyncio.run(run(True))
    off, _ = asyncio.run(run(False))
    assert on == off
    assert stats.cached_tokens > 40 and 0 < stats.cache_hit_rate < 1


def test_a_crowd_behind_one_system_prompt(smollm2: Path) -> None:
    """They read the pages of a common beginning together, each to another length: the tokens are those of each alone."""
    runner = load(smollm2).runner
    rng = random.Random(2)
    system = [rng.randrange(100, 40_000) for _ in range(100)]
    prompts = [system + [rng.randrange(100, 40_000) for _ in range(1 + 7 * i % 40)] for i in range(12)]

    async def run(sharing: bool) -> list[tuple[int, ...]]:
        async with AsyncEngine(runner, allow_block_sharing=sharing, num_blocks=80) as engine:
            settings = {"max_new_tokens": 10, "temperature": 0.0, "ignore_eos": True}
            if not sharing:
                return [(await engine.generate(prompt, **settings)).token_ids for prompt in prompts]
            found = [answer.token_ids for answer in await engine.generate_batch(prompts, **settings)]
            assert engine.stats().cached_tokens > 10 * 64
            return found

    assert asyncio.run(run(True)) == asyncio.run(run(False))
