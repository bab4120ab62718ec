"""Random models small enough to be made on the spot: 2 or 3 layers, a vocabulary of 128, weights with a wide spread."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that the logits differ: greedy tokens are compared between two ways of computing them.
    "initializer_range": 0.4,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def _sizes(**changes: Any) -> dict[str, Any]:
    return {**SIZES, **changes}


def _moe(**changes: Any) -> dict[str, Any]:
    return _sizes(num_experts_per_tok=2, **changes)


def _gemma3_composite() -> tuple[str, Any]:
    text = _sizes(head_dim=16, sliding_window=8, num_hidden_layers=3, layer_types=ALTERNATING, query_pre_attn_scalar=16)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config={**text, "model_type": "gemma3_text"},
        vision_config={**vision, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        initializer_range=0.4,
    )
    return "Gemma3ForConditionalGeneration", config


# Class name of the model, and its config. Those of the second group have windows.
_RECIPES: dict[str, Callable[[], tuple[str, Any]]] = {
    "llama": lambda: ("LlamaForCausalLM", transformers.LlamaConfig(**_sizes())),
    "llama-mha": lambda: ("LlamaForCausalLM", transformers.LlamaConfig(**_sizes(num_key_value_heads=4))),
    "mistral": lambda: ("MistralForCausalLM", transformers.MistralConfig(**_sizes(sliding_window=None))),
    "qwen2": lambda: ("Qwen2ForCausalLM", transformers.Qwen2Config(**_sizes())),
    "qwen3": lambda: ("Qwen3ForCausalLM", transformers.Qwen3Config(**_sizes(head_dim=16))),
    "phi3": lambda: ("Phi3ForCausalLM", transformers.Phi3Config(**_sizes())),
    "olmo": lambda: ("OlmoForCausalLM", transformers.OlmoConfig(**_sizes(clip_qkv=2.0))),
    "olmo2": lambda: ("Olmo2ForCausalLM", transformers.Olmo2Config(**_sizes())),
    "gpt2": lambda: (
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4
        ),
    ),
    "mixtral": lambda: (
        "MixtralForCausalLM",
        transformers.MixtralConfig(**_moe(num_local_experts=4, sliding_window=None)),
    ),
    "qwen3-moe": lambda: (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig(**_moe(num_experts=4, moe_intermediate_size=24, head_dim=16)),
    ),
    "mistral-window": lambda: ("MistralForCausalLM", transformers.MistralConfig(**_sizes(sliding_window=8))),
    "gemma2": lambda: (
        "Gemma2ForCausalLM",
        transformers.Gemma2Config(
            **_sizes(
                head_dim=16,
                sliding_window=8,
                num_hidden_layers=3,
                layer_types=ALTERNATING,
                query_pre_attn_scalar=16,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=None,
            )
        ),
    ),
    "gemma3-text": lambda: (
        "Gemma3ForCausalLM",
        transformers.Gemma3TextConfig(
            **_sizes(
                head_dim=16, sliding_window=8, num_hidden_layers=3, layer_types=ALTERNATING, query_pre_attn_scalar=16
            )
        ),
    ),
    "gemma3-composite": _gemma3_composite,
    "gpt-oss": lambda: (
        "GptOssForCausalLM",
        transformers.GptOssConfig(
            **_moe(num_hidden_layers=3, layer_types=ALTERNATING, head_dim=16, sliding_window=8, num_local_experts=4)
        ),
    ),
}
FULL = ["llama", "llama-mha", "mistral", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "gpt2", "mixtral", "qwen3-moe"]
WINDOWED = ["mistral-window", "gemma2", "gemma3-text", "gemma3-composite", "gpt-oss"]
NAMES = FULL + WINDOWED


def tiny(name: str) -> PreTrainedModel:
    """A new model, the same weights every time, in evaluation mode. torch's global random state is put back."""
    kind, config = _RECIPES[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = getattr(transformers, kind)(config).float().eval()
        if getattr(config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation(
                "eager"
            )  # the default of transformers 5.17 is SDPA, which ignores the soft cap
        for parameter in model.parameters():
            # Biases and sinks are made as zeros, which would test nothing.
            if parameter.ndim == 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.3)
    return model
