"""Packed, chunked, mixed steps over shuffled pages give the tokens and logits of transformers' `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cbengine.models.adapter import TransformersRunner
from cbengine.models.load import load
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import NAMES, tiny

NEW = 10


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_generate(name: str) -> None:
    model = tiny(name)
    prompts = prompts_of([1, 5, 37, 12, 20], seed=1)
    expected = [reference(model, prompt, NEW) for prompt in prompts]
    served = Paged(TransformersRunner(model)).generate(prompts, NEW)
    for sequence, (tokens, logits) in zip(served, expected, strict=True):
        torch.testing.assert_close(torch.stack(sequence.logits), logits, rtol=1e-3, atol=1e-3)
        assert sequence.tokens == tokens
    assert len({tuple(tokens[-NEW:]) for tokens, _ in expected}) == len(prompts)  # answers that differ, and so can fail


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_eager_backend_equals_generate(name: str) -> None:
    model = tiny(name)
    prompts = prompts_of([3, 26], seed=2)
    expected = [reference(model, prompt, NEW)[0] for prompt in prompts]
    served = Paged(TransformersRunner(model, attention="eager")).generate(prompts, NEW)
    assert [sequence.tokens for sequence in served] == expected


def test_real_model(smollm2: Path) -> None:
    loaded = load(smollm2)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a village by the sea, "]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = [reference(loaded.runner.model, prompt, 6)[0] for prompt in prompts]
    served = Paged(loaded.runner, page_size=16, num_blocks=40).generate(prompts, 6, budget=20)
    assert [sequence.tokens for sequence in served] == expected
    assert "Paris" in tokenizer.decode(served[0].tokens)
