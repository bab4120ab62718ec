"""Real models for tests, and what transformers itself answers with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDERS = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}
"""Folder of each model under $CBENGINE_MODELS, as `examples/get_models.py` lays them down."""


def model_folder(name: str) -> Path:
    """The folder of a model. Fails the test, with what to do, if it is not there."""
    parent = Path(os.environ.get("CBENGINE_MODELS", "~/.cache/cbengine-models")).expanduser()
    folder = parent / FOLDERS[name]
    if not (folder / "config.json").is_file():
        pytest.fail(f"no model at {folder}: run `bash tests/run.sh`, or `python examples/get_models.py {name}`")
    return folder


class Reference:
    """Greedy answers of `transformers.generate`, one prompt at a time, remembered: the truth of parity tests.

    `model` is the plain transformers model in float32, on the CPU, in eval mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._answers: dict[tuple[int, ...], tuple[int, list[int]]] = {}

    def __call__(self, prompt: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
        """The first `n` new tokens after `prompt`; fewer if the model ended, then with its end token as the last one.

        With `ignore_eos` the end token is a token like any other, and there are always `n`.
        """
        key = (*prompt, -1) if ignore_eos else tuple(prompt)
        known, answer = self._answers.get(key, (0, []))
        if known < n:
            answer = self._generate(prompt, n, ignore_eos)
            self._answers[key] = (n, answer)
        return answer[:n]

    def confirmed(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
        """`self(prompt, len(answer), ignore_eos=True)` for each, and in a fraction of its time where that is `answer`.

        A forward over prompt and answer tells: it is if each of its tokens is the most likely one after those before it.
        Some go through the model together, padded on the right, where a causal model does not look.
        """
        group: list[tuple[list[int], list[int]]] = []
        for prompt, answer in sorted(zip(prompts, answers, strict=True), key=lambda pair: len(pair[0])):
            if self._answers.get((*prompt, -1), (0, []))[0] >= len(answer):
                continue
            if group and (len(group) + 1) * (len(prompt) + len(answer)) > 600:
                self._confirm(group)
                group = []
            group.append((prompt, answer))
        if group:
            self._confirm(group)
        return [self(p, len(answer), ignore_eos=True) for p, answer in zip(prompts, answers, strict=True)]

    def _confirm(self, group: list[tuple[list[int], list[int]]]) -> None:
        """Remember those of these answers that are right."""
        import torch

        longest, start = max(len(p) + len(answer) for p, answer in group), min(len(p) for p, _ in group) - 1
        ids = torch.tensor([[*p, *answer, *[0] * (longest - len(p) - len(answer))] for p, answer in group])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=longest - start).logits
        for (prompt, answer), most_likely in zip(group, logits.argmax(-1).tolist(), strict=True):
            at = len(prompt) - 1 - start
            if most_likely[at : at + len(answer)] == answer:
                self._answers[(*prompt, -1)] = (len(answer), answer)

    def _generate(self, prompt: Sequence[int], n: int, ignore_eos: bool) -> list[int]:
        import torch

        ids = torch.tensor([list(prompt)])
        eos = self.model.generation_config.eos_token_id
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                do_sample=False,
                temperature=None,
                top_k=None,
                top_p=None,
                eos_token_id=None if ignore_eos else eos,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()


def load_reference(folder: Path) -> Reference:
    """Load the model of a folder for reference answers."""
    import torch
    from transformers import AutoModelForCausalLM

    return Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
