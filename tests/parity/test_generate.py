"""Greedy tokens in float32 equal `transformers.generate`: alone, in crowds, split, starved of pages, with one slot or two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, EngineStats
from cbengine.models.adapter import TransformersRunner
from cbengine.models.load import load
from tests.models.paged import reference as generated
from tests.models.tiny import FULL, VOCAB, tiny
from tests.support.models import Reference

LENGTHS = (*range(1, 21), 24, 31, 32, 33, 47, 64, 65, 90, 129, 200, 350, 700)
NEW_TOKENS = 8

TEXT = """The sea was calm that morning, and the boats in the harbour hardly moved. Anna had been up since four. She had
mended two nets, boiled coffee on the small stove, and written a list: rope, paint, 3 new lamps (the old ones leaked), and
a letter to her brother. "If the wind turns," said the old man on the quay, "you won't be back before Sunday." She knew.
def area(r): return 3.14159 * r ** 2  # the circle's area. In 1912 the lighthouse was automated; in 1987, forgotten. """


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """32 prompts of 1 to 700 tokens: windows of a text, each beginning elsewhere."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2)(TEXT * 8)["input_ids"]
    return [ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


def serve(
    model: Any, prompts: Sequence[Sequence[int]], *, alone: bool = False, **settings: Any
) -> tuple[list[list[int]], EngineStats]:
    """Greedy answers of an engine with these settings, to all prompts at once or one after the other."""

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with AsyncEngine(model, **settings) as engine:
            options: dict[str, Any] = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            if alone:
                answers = [await engine.generate(prompt, **options) for prompt in prompts]
            else:
                answers = await engine.generate_batch(prompts, **options)
            return [list(answer.token_ids) for answer in answers], engine.stats()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> TransformersRunner:
    """The loaded model, served by one engine after the other."""
    return load(smollm2, with_tokenizer=False).runner


def check(reference: Reference, prompts: list[list[int]], answers: list[list[int]]) -> None:
    assert {len(answer) for answer in answers} == {NEW_TOKENS}
    assert answers == reference.confirmed(prompts, answers)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["two slots", "one slot"])
def test_smollm2_in_a_crowd(
    runner: TransformersRunner, prompts: list[list[int]], reference_generate: Reference, asynchronous: bool
) -> None:
    # 64 tokens a step: every longer prompt is split, and its pieces ride with others' decodes.
    answers, stats = serve(
        runner, prompts, max_batch_tokens=64, page_size=16, num_blocks=256, use_async_batching=asynchronous
    )
    check(reference_generate, prompts, answers)
    assert stats.steps >= sum(map(len, prompts)) // 64


@pytest.mark.timeout(300)
def test_smollm2_alone(smollm2: Path, prompts: list[list[int]], reference_generate: Reference) -> None:
    answers, _ = serve(str(smollm2), prompts, alone=True, page_size=256, num_blocks=4)
    check(reference_generate, prompts, answers)


@pytest.mark.timeout(300)
def test_smollm2_preempted_again_and_again(
    runner: TransformersRunner, prompts: list[list[int]], reference_generate: Reference
) -> None:
    # Room for the longest prompt and little more, in pages of 4 tokens that are soon full.
    short = [prompt for prompt in prompts if len(prompt) <= 129]
    answers, stats = serve(runner, short, max_batch_tokens=128, page_size=4, num_blocks=36, safety_margin=0.0)
    check(reference_generate, short, answers)
    assert stats.preemptions >= 5


def test_generate_itself(prompts: list[list[int]], reference_generate: Reference) -> None:
    """What `check` goes by is what `generate` says, looked at for some prompts."""
    some = [prompts[0], prompts[16], prompts[25]]
    answers = [generated(reference_generate.model, prompt, NEW_TOKENS)[0][len(prompt) :] for prompt in some]
    assert reference_generate.confirmed(some, answers) == answers


@pytest.mark.parametrize("name", [name for name in FULL if name != "gpt2"])
def test_tiny_models(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (1, 2, 5, 9, 17, 30, 60, 100)]
    reference = Reference(tiny(name))
    expected = [reference(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    for settings in (
        {"max_batch_tokens": 16, "num_blocks": 128},
        {"max_batch_tokens": 64, "num_blocks": 128, "use_async_batching": False},
        {"max_batch_tokens": 32, "num_blocks": 29, "safety_margin": 0.0, "scheduler_type": "prefill_first"},
    ):
        answers, _ = serve(tiny(name), prompts, page_size=4, **settings)
        assert answers == expected, settings
