"""Logits of whole models over every attention backend, prompts in pieces beside decodes; and of the fused forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cbengine.cache.geometry import group_of_layers
from cbengine.models.adapter import TransformersRunner
from tests.attention.packing import Work, step
from tests.gpu import networks
from tests.gpu.card import Card

pytestmark = pytest.mark.gpu


class Served:
    """A runner over a cache of its own, whose attention types all have pages for everything."""

    def __init__(self, runner: TransformersRunner, card: Card, page: int, blocks: int) -> None:
        self.runner, self.card, self.page = runner, card, page
        self.free = random.Random(1).sample(range(3, blocks), blocks - 3)
        layers = runner.spec.layers
        shape = (blocks, len(layers), 2, page, layers[0].num_kv_heads, layers[0].head_dim)
        self.pool = torch.zeros(shape, dtype=runner.spec.kv_dtype, device=card.device)
        runner.bind([(self.pool[:, i, 0], self.pool[:, i, 1]) for i in range(len(layers))], page)
        self.groups = max(group_of_layers(layers)) + 1

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.page))]

    def forward(self, decodes: Sequence[Work], chunks: Sequence[Work], padded: int = 0) -> torch.Tensor:
        """float32 logits of the works that sample. All attention types have the same table."""
        inputs = step(decodes, chunks, padded_tokens=padded)
        if self.groups > 1:
            inputs.group_tables = (inputs.block_tables,) * self.groups
            inputs.host_group_tables = (inputs.host_block_tables,) * self.groups
        return self.runner.forward(self.card.move(inputs)).float()


def two_sequences(served: Served, tokens: list[list[int]]) -> list[torch.Tensor]:
    """Logits of the last four positions of two sequences: one decodes while the other's prompt comes in pieces."""
    (a, b), half = tokens, len(tokens[1]) // 2
    blocks = [served.take(len(sequence)) for sequence in tokens]

    def work(which: int, start: int, end: int, samples: bool = True) -> Work:
        used = blocks[which][: -(-end // served.page)]
        return Work(end, end - start, used, tokens[which][start:end], samples)

    n, m = len(a), len(b)
    rows = [
        served.forward([], [work(0, 0, n - 3)], padded=2),
        served.forward([work(0, n - 3, n - 2)], [work(1, 0, half, False)]),
        served.forward([work(0, n - 2, n - 1)], [work(1, half, m - 3)], padded=1),
        served.forward([work(0, n - 1, n), work(1, m - 3, m - 2)], []),
        served.forward([work(1, m - 2, m - 1)], []),
        served.forward([work(1, m - 1, m)], []),
    ]
    first = [rows[0][0], rows[1][0], rows[2][0], rows[3][0]]
    second = [rows[2][1], rows[3][1], rows[4][0], rows[5][0]]
    return [torch.stack(first), torch.stack(second)]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of a row."""
    pairs = zip(torch.cat(found), torch.cat(expected), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def error_of(
    card: Card, model: Any, backend: str, page: int, tokens: list[list[int]], truth: list[torch.Tensor]
) -> tuple[float, str]:
    """Of a model over a backend; and by what it was run."""
    runner = TransformersRunner(model, attention=backend)
    # A dry run has our kernels run it over one of the backends.
    with card.fusing() if backend == "triton" else nullcontext():
        try:
            served = Served(runner, card, page, blocks=64)
            return distance(two_sequences(served, tokens), truth), type(runner._fused).__name__
        finally:
            runner.release()


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("name", networks.NAMES)
def test_logits_are_transformers(card: Card, name: str, page: int) -> None:
    """In float32 within 1e-3; in bfloat16 at most three times as far from float32 as transformers' own forward is."""
    page = card.size(page, 16)
    tokens = networks.prompts(card, card.size([150, 420], [9, 14]), seed=3)
    truth: list[torch.Tensor] = []
    for dtype in card.dtypes:
        model: Any = networks.network(name, card, dtype)
        plain = [networks.logits(model, sequence)[-4:] for sequence in tokens]
        truth = truth or plain
        bound = 1e-3 if dtype == torch.float32 else 3 * distance(plain, truth) + 1e-3
        spec = TransformersRunner(model).spec
        backends = card.backends(spec, page)
        for backend in backends:
            error, kind = error_of(card, model, backend, page, tokens, truth)
            assert error <= bound, f"{backend} in {dtype}: {error:.1e}, {bound:.1e} are allowed"
            if backend == "triton":
                assert kind == "FusedGpu", f"{name} was not fused: {kind}"


def test_a_trained_weight_counts_from_the_next_step_on(card: Card) -> None:
    """Merged weights are the model's own memory."""
    tokens = networks.prompts(card, card.size([150, 420], [9, 14]), seed=3)
    model: Any = networks.network("llama", card)
    runner = TransformersRunner(model, attention="triton")
    try:
        served = Served(runner, card, 16, blocks=128)
        before = two_sequences(served, tokens)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
            model.model.layers[1].mlp.up_proj.weight.add_(0.05)
        after = two_sequences(served, tokens)
    finally:
        runner.release()
    expected = [networks.logits(model, sequence)[-4:] for sequence in tokens]
    assert distance(after, before) > 1e-2
    assert distance(after, expected) <= 1e-3
