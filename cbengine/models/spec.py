"""Reading a transformers config: what the engine has to know of a model, and whether it can serve it at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from cbengine.errors import UnsupportedFeatureError
from cbengine.models.base import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

_log = logging.getLogger(__name__)

_SERVED = "cbengine serves decoder-only models with causal full or sliding window attention in every layer"
_LEGACY_TYPES = {"attention": "full_attention"}


def spec_from_config(
    config: PretrainedConfig,
    *,
    name: str,
    kv_dtype: torch.dtype,
    weight_bytes: int = 0,
    generation_config: GenerationConfig | None = None,
) -> ModelSpec:
    """The spec of a model by its config alone; no weights are needed.

    Raises:
        UnsupportedFeatureError: the config describes something that cannot be served; says what, and what can be.
    """
    text = text_config(config, name)
    _refuse_other_architectures(config, text, name)
    heads = int(text.num_attention_heads)
    return ModelSpec(
        name=name,
        layers=_layers(text, name),
        num_heads=heads,
        hidden_size=int(text.hidden_size),
        intermediate_size=_intermediate_size(text),
        vocab_size=int(text.vocab_size),
        max_model_len=_max_model_len(text, name),
        kv_dtype=kv_dtype,
        weight_bytes=weight_bytes,
        eos_token_ids=_eos_token_ids(generation_config, config, text),
        generation_defaults=_generation_defaults(generation_config, name),
        softcap=getattr(text, "attn_logit_softcapping", None),
        num_rotaries=max(1, len(_rope_parameters(text))),
    )


def text_config(config: PretrainedConfig, name: str) -> PretrainedConfig:
    """The config of the language model: `config` itself, or the text part of a multimodal one.

    Raises:
        UnsupportedFeatureError: an encoder-decoder, or a composite without one text decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedFeatureError(f"{name} is an encoder-decoder model ({config.model_type}); {_SERVED}")
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedFeatureError(f"{name} has several text models: {error}; {_SERVED}") from error
    needed = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    missing = [attribute for attribute in needed if getattr(text, attribute, None) is None]
    if missing:
        raise UnsupportedFeatureError(
            f"{name}: its config ({type(text).__name__}) does not describe a decoder, {', '.join(missing)} is missing; "
            f"{_SERVED}"
        )
    return text


def _refuse_other_architectures(config: PretrainedConfig, text: PretrainedConfig, name: str) -> None:
    def has(attribute: str) -> Any:
        return getattr(text, attribute, None)

    found = None
    if getattr(text, "is_encoder_decoder", False):
        found = f"an encoder-decoder ({text.model_type})"
    elif has("is_causal") is False or has("use_bidirectional_attention") in (True, "all"):
        found = "attention that is not causal"
    elif has("add_cross_attention") or getattr(config, "add_cross_attention", False) or has("cross_attention_layers"):
        found = "cross attention"
    elif has("kv_lora_rank"):
        found = f"multi-head latent attention (kv_lora_rank={has('kv_lora_rank')})"
    elif has("num_kv_shared_layers") or any(mode is not None for mode in has("kv_sharing_modes") or ()):
        found = "layers that share the keys and values of other layers"
    if found is not None:
        raise UnsupportedFeatureError(f"{name} has {found}; {_SERVED}")


def _layers(text: PretrainedConfig, name: str) -> tuple[LayerSpec, ...]:
    count = int(text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        # As transformers' caches infer it.
        if window is not None:
            types = ["sliding_attention"] * count
        elif getattr(text, "attention_chunk_size", None) is not None:
            types = ["chunked_attention"] * count
        else:
            types = ["full_attention"] * count
    types = [_LEGACY_TYPES.get(kind, kind) for kind in types]
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedFeatureError(
            f"{name} has layers of type {', '.join(other)}; supported are full_attention and sliding_attention"
        )
    if len(types) != count:
        raise UnsupportedFeatureError(f"{name}: its config has {count} layers, but {len(types)} layer_types")
    if "sliding_attention" in types and not (isinstance(window, int) and window > 0):
        raise UnsupportedFeatureError(f"{name} has sliding_attention layers, but sliding_window={window!r}")
    kv_heads, head_dim = _kv_layout(text, name)
    return tuple(
        LayerSpec(kind, kv_heads, head_dim, int(window) if window is not None and kind == "sliding_attention" else None)
        for kind in types
    )


def _kv_layout(text: PretrainedConfig, name: str) -> tuple[int, int]:
    """KV heads and head size, which have to be the same in all layers, for keys and values alike."""
    heads = int(text.num_attention_heads)

    def of(config: Any) -> tuple[int, int]:
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(kv_heads), int(head_dim)

    base = of(text)
    others: dict[str, Any] = {
        "global_head_dim": base[1],
        "swa_head_dim": base[1],
        "v_head_dim": base[1],
        "swa_v_head_dim": base[1],
        "num_global_key_value_heads": base[0],
        "swa_num_key_value_heads": base[0],
    }
    for attribute, expected in others.items():
        value = getattr(text, attribute, None)
        if value is not None and value != expected:
            raise UnsupportedFeatureError(
                f"{name} has layers with different KV heads: {attribute}={value}, elsewhere {expected}; "
                "all layers must have the same number and size of KV heads"
            )
    if getattr(text, "is_heterogeneous", False):
        layouts = sorted({of(layer) for layer in text.per_layer_config})
        if layouts != [base]:
            raise UnsupportedFeatureError(
                f"{name} has layers with different KV heads (heads, head size): {layouts}; "
                "all layers must have the same number and size of KV heads"
            )
    if heads % base[0]:
        raise UnsupportedFeatureError(f"{name}: {heads} attention heads cannot be shared out over {base[0]} KV heads")
    return base


def _intermediate_size(text: PretrainedConfig) -> int:
    """Widest activation of the feed-forward part for one token, which sizes the memory of a step."""
    size = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    if isinstance(size, (list, tuple)):
        size = max(size)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    expert_size = getattr(text, "moe_intermediate_size", None)
    if expert_size is None:
        return int(size) * int(experts)
    return max(int(size), int(expert_size) * int(experts))


def _max_model_len(text: PretrainedConfig, name: str) -> int:
    """The model's context.

    RoPE variants that change all frequencies once the longest sequence *of the batch* passes the original context
    ("longrope", "dynamic") are served up to that context: past it, a request's tokens would depend on its neighbours.
    """
    longest = getattr(text, "max_position_embeddings", None)
    if not longest:
        raise UnsupportedFeatureError(
            f"{name}: its config has no max_position_embeddings, so its longest sequence is not known; set "
            "`config.max_position_embeddings` and pass the model itself"
        )
    limit = int(longest)
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if original and (kind == "longrope" or "dynamic" in kind):
            limit = min(limit, int(original))
    return limit


def _rope_parameters(text: PretrainedConfig) -> list[Mapping[str, Any]]:
    """RoPE settings: one for the model, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _eos_token_ids(generation: GenerationConfig | None, *configs: PretrainedConfig) -> tuple[int, ...]:
    """End-of-sequence tokens: the generation config's, else the first config's that has any."""
    for source in (generation, *configs):
        ids = getattr(source, "eos_token_id", None)
        if ids is None:
            continue
        ids = ids if isinstance(ids, (list, tuple)) else [ids]
        return tuple(dict.fromkeys(int(i) for i in ids))
    return ()


def _generation_defaults(generation: GenerationConfig | None, name: str) -> dict[str, float | int]:
    """What the checkpoint itself sets. A value that is None was not set, and our own default holds then.

    `do_sample=False` is temperature 0; values that `SamplingParams` would not take are left out with a warning.
    """
    if generation is None:
        return {}
    defaults: dict[str, float | int] = {}
    ranges = {"temperature": math.inf, "top_k": math.inf, "top_p": 1.0, "min_p": 1.0, "max_new_tokens": math.inf}
    for field, high in ranges.items():
        value = getattr(generation, field, None)
        if value is None:
            continue
        whole = field in ("top_k", "max_new_tokens")
        low = 1 if field == "max_new_tokens" else 0
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (whole and value != int(value)):
            _log.warning("%s: its generation config has %s=%r, which is left out", name, field, value)
            continue
        defaults[field] = int(value) if whole else float(value)
    if getattr(generation, "do_sample", None) is False:
        defaults["temperature"] = 0.0
    return defaults
