"""Models with random weights in the shapes of published ones. Nothing is downloaded."""

from __future__ import annotations

import importlib
import random
from typing import Any

import torch

from benchmarks.gpu_parts.machine import Machine

transformers: Any = importlib.import_module("transformers")

CONTEXT = 4096
_GEMMA_LAYERS = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2

# Class of the config, and its sizes: those of Qwen/Qwen3-0.6B, meta-llama/Meta-Llama-3-8B and google/gemma-3-1b-it.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "llama3-8b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-1b": (
        "Gemma3TextConfig",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "layer_types": _GEMMA_LAYERS,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
    ),
}
_DRY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def build(name: str, machine: Machine) -> Any:
    """A new model on the device, in evaluation mode."""
    kind, sizes = SHAPES[name]
    if machine.dry:
        few = {"layer_types": ["sliding_attention", "full_attention"]} if "layer_types" in sizes else {}
        sizes = {**sizes, **_DRY, **few}
    ends = {"max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, kind)(**sizes, **ends)
    with torch.device(machine.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=machine.dtype)
    return model.to(machine.device).eval()


def random_prompts(model: Any, count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids without meaning; no two prompts begin alike."""
    rng = random.Random(seed)
    return [[rng.randrange(3, model.config.vocab_size) for _ in range(length)] for _ in range(count)]
