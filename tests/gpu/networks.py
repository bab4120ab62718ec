"""Models with random weights, made on the spot: small ones with real head sizes, whose greedy tokens are well apart."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.gpu.card import Card

Answer = list[int]


def _sizes(card: Card, **changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": card.size(2048, 128),
        "hidden_size": card.size(256, 32),
        "intermediate_size": card.size(512, 48),
        "num_hidden_layers": card.size(4, 2),
        "num_attention_heads": card.size(8, 4),
        "num_key_value_heads": 2,
        "head_dim": card.size(64, 16),
        "max_position_embeddings": card.size(4096, 256),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Wide enough that the logits differ: greedy tokens are compared between two ways of computing them.
        "initializer_range": card.size(0.14, 0.4),
    }
    return {**sizes, **changes}


def _hybrid(card: Card, **changes: Any) -> dict[str, Any]:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    layers = card.size(4, 2)
    given = {
        "layer_types": types[:layers],
        "sliding_window": card.size(96, 8),
        "query_pre_attn_scalar": card.size(64, 16),
    }
    return _sizes(card, **given, **changes)


_RECIPES: dict[str, Callable[[Card], tuple[str, Any]]] = {
    "llama": lambda card: ("LlamaForCausalLM", transformers.LlamaConfig(**_sizes(card))),
    "qwen3": lambda card: ("Qwen3ForCausalLM", transformers.Qwen3Config(**_sizes(card))),
    "gemma3": lambda card: ("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**_hybrid(card))),
    "gemma2": lambda card: (
        "Gemma2ForCausalLM",
        transformers.Gemma2Config(**_hybrid(card, attn_logit_softcapping=5.0, final_logit_softcapping=None)),
    ),
}
NAMES = list(_RECIPES)


def network(name: str, card: Card, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Any:
    """A new model on the device, the same weights every time."""
    kind, config = _RECIPES[name](card)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model: PreTrainedModel = getattr(transformers, kind)(config).float().eval()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # the default of transformers 5.17 is SDPA, which ignores the soft cap
    moved: Any = model.to(dtype)
    return moved.to(device or card.device)


def prompts(card: Card, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, card.size(2048, 128)) for _ in range(n)] for n in lengths]


def greedy(model: Any, prompt: Sequence[int], new: int) -> Answer:
    """Transformers' own answer to one prompt alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, V]: transformers' own, of every position."""
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].float()


def assert_same(
    model: Any, given: Sequence[Sequence[int]], found: Sequence[Answer], expected: Sequence[Answer]
) -> None:
    """Greedy answers agree. Where two differ, the first differing pair of tokens was as good as tied by the model's own
    logits (float32 sums in another order); and no more than one answer in eight may have met such a tie."""
    ties = 0
    for prompt, one, other in zip(given, found, expected, strict=True):
        assert len(one) == len(other), (len(one), len(other))
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is None:
            continue
        row = logits(model, [*prompt, *other[:at]])[-1]
        gap, spread = abs(float(row[one[at]] - row[other[at]])), float(row.std())
        assert gap <= 1e-3 * spread, f"token {at}: {one[at]} and not {other[at]}, {gap / spread:.1e} deviations apart"
        ties += 1
    assert ties <= max(1, len(expected) // 8), f"{ties} of {len(expected)} answers differ"
