"""Steps replayed from graphs give the answers of steps that are not, at and around every captured size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine
from cbengine.execution.buckets import Bucket
from tests.gpu import networks
from tests.gpu.card import Card
from tests.gpu.serving import answers, ask, built, engine_for, run

pytestmark = pytest.mark.gpu

MODELS = ["llama", "gemma3"]


def watch(engine: AsyncEngine) -> Counter[Bucket]:
    """Counts the replays of each shape."""
    graphs = built(engine).loop.parts.pipeline.graphs
    counts: Counter[Bucket] = Counter()
    plain = graphs.run

    def counted(bucket: Bucket, step_inputs: torch.Tensor) -> torch.Tensor:
        counts[bucket] += 1
        return plain(bucket, step_inputs)

    graphs.run = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_every_decode_size(card: Card, name: str) -> None:
    """Batches just at, under and over each captured size."""
    most, new = card.size(25, 5), card.size(6, 3)
    model: Any = networks.network(name, card)
    sizes = card.size([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25], [1, 3, 5])
    batches = [networks.prompts(card, [3 + i for i in range(size)], seed=size) for size in sizes]
    settings: dict[str, Any] = {"max_requests_per_batch": most, "max_batch_tokens": card.size(1024, 64)}

    async def by_batches(**more: Any) -> tuple[list[list[list[int]]], Counter[Bucket]]:
        async with engine_for(model, card, **settings, **more) as engine:
            counts = watch(engine)
            return [await ask(engine, batch, new) for batch in batches], counts

    found, counts = run(by_batches(**card.graphs))
    captured = {bucket.seqs for bucket in counts if bucket.decode}
    assert captured >= {size for size in (1, 2, 4, 8, 16, 24, 25) if size in sizes}, captured
    plain, none = run(by_batches(use_cuda_graph=False))
    assert not none
    for batch, one, other in zip(batches, found, plain, strict=True):
        networks.assert_same(model, batch, one, other)


@pytest.mark.parametrize("name", MODELS)
def test_every_prompt_size(card: Card, name: str) -> None:
    """Prompts just at, under and over each captured number of tokens; longer ones run without a graph."""
    model: Any = networks.network(name, card)
    lengths = card.size([1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 448, 511, 512, 513, 600], [1, 15, 16, 17])
    prompts, new = networks.prompts(card, lengths, seed=9), 2
    settings: dict[str, Any] = {"max_batch_tokens": card.size(640, 32), "q_padding_interval_size": card.size(64, 16)}
    settings["max_requests_per_batch"] = card.size(32, 3)

    async def one_by_one(**more: Any) -> tuple[list[list[int]], Counter[Bucket]]:
        async with engine_for(model, card, **settings, **more) as engine:
            counts = watch(engine)
            return [(await ask(engine, [prompt], new))[0] for prompt in prompts], counts

    found, counts = run(one_by_one(**card.graphs))
    used = {bucket.tokens for bucket in counts if not bucket.decode}
    assert used >= set(card.size([64, 128, 192, 256, 320, 448, 512], [16, 32])), used
    plain, none = run(one_by_one(use_cuda_graph=False))
    assert not none
    networks.assert_same(model, prompts, found, plain)


def test_graphs_beside_a_thread_that_allocates(card: Card) -> None:
    """Captures are not broken by what other threads of the process do meanwhile."""
    import threading

    model: Any = networks.network("llama", card)
    prompts = networks.prompts(card, [4, 9, 20])
    over = threading.Event()
    errors: list[BaseException] = []

    def allocate() -> None:
        try:
            while not over.is_set():
                torch.ones(1 << 16, device=card.device).add_(1)
                if not card.dry:
                    torch.empty(1 << 12, pin_memory=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        found, _ = answers(model, card, prompts, 4, **card.graphs)
    finally:
        over.set()
        thread.join()
    assert not errors
    networks.assert_same(model, prompts, found, [networks.greedy(model, prompt, 4) for prompt in prompts])
