"""Greedy decoding over a paged cache with packed, chunked, mixed steps, driven by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from cbengine.execution.inputs import StepInputs
from cbengine.models.adapter import TransformersRunner
from tests.attention.packing import Work, step


@dataclass
class Request:
    """One request: what it has, what of it is computed, and the logits that each new token was chosen by."""

    tokens: list[int]
    blocks: list[int]
    target: int
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Paged:
    """A runner bound to a cache of its own. Blocks are handed out in a shuffled order."""

    def __init__(self, runner: TransformersRunner, *, page_size: int = 5, num_blocks: int = 80, seed: int = 0) -> None:
        self.runner = runner
        self.page_size = page_size
        self.rng = random.Random(seed)
        self.free = self.rng.sample(range(2, num_blocks), num_blocks - 2)
        layers = runner.spec.layers
        pages = (page_size, layers[0].num_kv_heads, layers[0].head_dim)
        self.pool = torch.zeros(num_blocks, len(layers), 2, *pages, dtype=runner.spec.kv_dtype)
        runner.bind([(self.pool[:, i, 0], self.pool[:, i, 1]) for i in range(len(layers))], page_size)

    def forward(self, decodes: Sequence[Work], chunks: Sequence[Work], padded_tokens: int = 0) -> torch.Tensor:
        inputs: StepInputs = step(decodes, chunks, padded_tokens=padded_tokens)
        logits = self.runner.forward(inputs)
        assert logits.shape == (inputs.num_samples, logits.shape[1])
        return logits

    def generate(self, prompts: Sequence[Sequence[int]], new: int, *, budget: int = 16) -> list[Request]:
        """Each prompt's greedy continuation. A prompt joins at a random step and is cut by the token budget of a step."""
        waiting = [Request(list(p), self._take(len(p) + new), len(p) + new) for p in prompts]
        everything, running = list(waiting), []
        while waiting or running:
            if waiting and (not running or self.rng.random() < 0.6):
                running.append(waiting.pop(0))
            self._step(running, budget)
            running = [s for s in running if len(s.tokens) < s.target]
        return everything

    def _step(self, running: list[Request], budget: int) -> None:
        decoding = [s for s in running if s.computed and s.computed == len(s.tokens) - 1]
        decodes = [self._work(s, 1) for s in decoding]
        chunks, prefilling, left = [], [], max(1, budget - len(decoding))
        for sequence in running:
            count = min(left, len(sequence.tokens) - sequence.computed)
            if sequence not in decoding and count:
                prefilling.append(sequence)
                chunks.append(self._work(sequence, count))
                left -= count
        padding = self.rng.randrange(3)
        works = [*decodes, *chunks]
        logits = iter(self.forward(decodes, [*chunks, *[Work(0, 1, [])] * padding], padded_tokens=padding))
        for sequence, work in zip([*decoding, *prefilling], works, strict=True):
            sequence.computed += work.count
            if work.samples:
                row = next(logits)
                sequence.logits.append(row)
                sequence.tokens.append(int(row.argmax()))

    def _work(self, s: Request, count: int) -> Work:
        end = s.computed + count
        used = s.blocks[: -(-end // self.page_size)]
        return Work(end, count, used, s.tokens[s.computed : end], samples=end == len(s.tokens))

    def _take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.page_size))]


def reference(model: PreTrainedModel, prompt: Sequence[int], new: int) -> tuple[list[int], torch.Tensor]:
    """Tokens (prompt and answer) and logits [new, V] of transformers' own greedy `generate`, one prompt alone."""
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out.sequences[0].tolist(), torch.cat(out.logits)


def prompts_of(lengths: Sequence[int], seed: int = 0, vocab: int = 128) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
