"""Greedy answers of the engine equal transformers' `generate`, in float32: with and without steps in flight, and graphs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import networks
from tests.gpu.card import Card
from tests.gpu.serving import answers

pytestmark = pytest.mark.gpu

LENGTHS = ([1, 15, 16, 17, 90, 255, 256, 257, 400, 700], [1, 16, 30])


@pytest.mark.parametrize("name", networks.NAMES)
def test_answers_are_generates(card: Card, name: str) -> None:
    """Prompts longer than a step among short ones, with every backend that is here and in every mode."""
    model: Any = networks.network(name, card)
    prompts, new = networks.prompts(card, card.size(*LENGTHS)), card.size(24, 4)
    expected = [networks.greedy(model, prompt, new) for prompt in prompts]
    modes: list[dict[str, Any]] = [
        {"use_async_batching": True, "use_cuda_graph": False},
        {"use_async_batching": False, "use_cuda_graph": False},
        {"use_async_batching": False, **card.graphs},
        {"use_async_batching": True, **card.graphs},
        {"attention_backend": "sdpa"},
        {"attention_backend": "triton", "page_size": 16, "num_blocks": card.size(900, 40)},
    ]
    for mode in modes:
        found, stats = answers(model, card, prompts, new, **mode)
        networks.assert_same(model, prompts, found, expected)
        assert stats.requests_finished == len(prompts) and not stats.requests_failed, mode
        assert [networks.greedy(model, prompts[0], 2)] == [expected[0][:2]], f"the model is not as it was after {mode}"


def test_compiled(card: Card) -> None:
    """Decoding through torch.compile; on a dry run by a compiler that changes nothing."""
    model: Any = networks.network("llama", card)
    prompts, new = networks.prompts(card, [5, 40, 17]), card.size(16, 4)
    expected = [networks.greedy(model, prompt, new) for prompt in prompts]
    how = {"dynamic": True} if not card.dry else {"dynamic": True, "backend": "eager"}
    found, _ = answers(model, card, prompts, new, decode_compile_config=how)
    networks.assert_same(model, prompts, found, expected)
