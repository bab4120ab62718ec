"""What is read out of configs, and which ones are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from cbengine.errors import UnsupportedFeatureError
from cbengine.models.adapter import TransformersRunner
from cbengine.models.base import LayerSpec, ModelSpec
from cbengine.models.spec import spec_from_config
from cbengine.sampling import SamplingParams
from tests.models.tiny import SIZES, tiny


def spec_of(config: Any, generation: GenerationConfig | None = None) -> ModelSpec:
    return spec_from_config(config, name="toy", kv_dtype=torch.float32, generation_config=generation)


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**SIZES, **changes})


def test_sizes() -> None:
    spec = spec_of(llama())
    assert spec.layers == (LayerSpec("full_attention", 2, 8),) * 2
    assert (spec.num_heads, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (4, 32, 48, 128)
    assert spec.max_model_len == 256
    assert spec.eos_token_ids == (2,)
    assert spec.generation_defaults == {}


def test_of_a_model() -> None:
    model = tiny("llama").bfloat16()
    spec = TransformersRunner(model, name="mine").spec
    assert spec.name == "mine"
    assert spec.kv_dtype == torch.bfloat16
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert spec.weight_bytes == 2 * parameters + buffers
    assert TransformersRunner(model).spec.name == "LlamaForCausalLM"


def test_tied_weights_count_once() -> None:
    with torch.random.fork_rng(devices=[]):
        tied, untied = (transformers.LlamaForCausalLM(llama(tie_word_embeddings=tie)) for tie in (True, False))
    difference = TransformersRunner(untied).spec.weight_bytes - TransformersRunner(tied).spec.weight_bytes
    assert difference == 128 * 32 * 4


def test_windows() -> None:
    sliding, full = LayerSpec("sliding_attention", 2, 16, 8), LayerSpec("full_attention", 2, 16)
    assert TransformersRunner(tiny("gemma2")).spec.layers == (sliding, full, sliding)
    assert TransformersRunner(tiny("gemma3-composite")).spec.layers == (sliding, full, sliding)
    # No layer_types: a window holds for every layer, none for none.
    for window in (9, None):
        config = transformers.MistralConfig(**SIZES, sliding_window=window)
        assert {layer.window for layer in spec_of(config).layers} == {window}
    # A window that the config names but does not use.
    unused = transformers.Qwen2Config(**SIZES, sliding_window=9, use_sliding_window=False)
    assert spec_of(unused).layers[0] == LayerSpec("full_attention", 2, 8)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (lambda: transformers.T5Config(), r"encoder-decoder model \(t5\)"),
        (lambda: transformers.MambaConfig(), "does not describe a decoder, num_attention_heads is missing"),
        (lambda: transformers.JambaConfig(), "layers of type linear_attention"),
        (lambda: transformers.Qwen3NextConfig(), "layers of type linear_attention"),
        (lambda: transformers.Llama4TextConfig(), "layers of type chunked_attention"),
        (lambda: transformers.DeepseekV3Config(), r"multi-head latent attention \(kv_lora_rank=512\)"),
        (lambda: transformers.Gemma3nTextConfig(), "share the keys and values of other layers"),
        (lambda: transformers.MllamaConfig(), "cross attention"),
        (lambda: transformers.GPT2Config(add_cross_attention=True), "cross attention"),
        (lambda: transformers.Gemma3TextConfig(use_bidirectional_attention=True), "attention that is not causal"),
        (lambda: transformers.BloomConfig(), "no max_position_embeddings"),
        (lambda: llama(v_head_dim=4), "v_head_dim=4, elsewhere 8"),
        (lambda: llama(global_head_dim=16), "different KV heads: global_head_dim=16, elsewhere 8"),
        (lambda: llama(num_key_value_heads=3), "4 attention heads cannot be shared out over 3 KV heads"),
        (lambda: transformers.SiglipVisionConfig(), "does not describe a decoder"),
    ],
)
def test_refusals_say_what_was_found_and_what_is_served(config: Any, found: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=found) as caught:
        spec_of(config())
    assert "toy" in str(caught.value)
    served = ("full_attention and sliding", "full or sliding", "same number", "shared out", "pass the model itself")
    assert any(text in str(caught.value) for text in served)


def test_rope_that_depends_on_the_batch_is_served_up_to_where_it_does_not() -> None:
    def phi3(original: int) -> Any:
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        return transformers.Phi3Config(
            **SIZES,
            original_max_position_embeddings=original,
            rope_parameters={**rope, "original_max_position_embeddings": original},
        )

    assert spec_of(phi3(64)).max_model_len == 64
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    assert spec_of(llama(rope_parameters=yarn)).max_model_len == 256


def test_experts_count_towards_the_widest_activation() -> None:
    def qwen3_moe(expert_size: int) -> Any:
        return transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=expert_size
        )

    assert spec_of(qwen3_moe(24)).intermediate_size == 72
    assert spec_of(qwen3_moe(10)).intermediate_size == 48
    assert spec_of(transformers.MixtralConfig(**SIZES, num_experts_per_tok=2)).intermediate_size == 96


def test_end_of_sequence_tokens() -> None:
    assert spec_of(llama(), GenerationConfig(eos_token_id=[5, 7, 5])).eos_token_ids == (5, 7)
    assert spec_of(llama(), GenerationConfig()).eos_token_ids == (2,)
    assert spec_of(llama(eos_token_id=[3, 4])).eos_token_ids == (3, 4)
    assert spec_of(llama(eos_token_id=None)).eos_token_ids == ()
    assert spec_of(llama(), GenerationConfig(eos_token_id=0)).eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("given", "defaults"),
    [
        ({}, {}),
        ({"do_sample": True}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20, "min_p": 0.05}, {"top_k": 20, "min_p": 0.05}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"max_new_tokens": 33, "max_length": 20}, {"max_new_tokens": 33}),
    ],
)
def test_sampling_defaults_are_what_the_checkpoint_sets(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    spec = spec_of(llama(), GenerationConfig(**given))
    assert spec.generation_defaults == defaults
    resolved = SamplingParams().resolved(spec.generation_defaults)
    assert all(getattr(resolved, key) == value for key, value in defaults.items())


def test_bad_sampling_defaults_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    generation = GenerationConfig()
    generation.top_k, generation.top_p, generation.temperature = -1, "high", float("nan")  # type: ignore[assignment]
    generation.min_p = 0.1  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "cbengine"):
        assert spec_of(llama(), generation).generation_defaults == {"min_p": 0.1}
    assert len(caplog.records) == 3
