"""Whether a transformers model is built such that its attention can be ours, and which of its modules attend."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from cbengine.errors import UnsupportedFeatureError
from cbengine.models.base import ModelSpec


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    tensors: dict[int, torch.Tensor] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def refuse_unknown_interface(model: PreTrainedModel, name: str) -> None:
    kind = type(model).__name__
    can_set: Callable[[], bool] | None = getattr(model, "_can_set_attn_implementation", None)
    if not getattr(model, "_supports_attention_backend", False) or (can_set is not None and not can_set()):
        raise UnsupportedFeatureError(
            f"{name}: {kind} does not attend through transformers' attention interface "
            "(_supports_attention_backend is False), so its attention cannot be replaced; models that do are supported"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedFeatureError(
            f"{name}: {kind}.forward takes no logits_to_keep; language models with a head (…ForCausalLM) are supported"
        )


def attention_modules(model: PreTrainedModel, spec: ModelSpec) -> list[nn.Module]:
    """The attention module of each layer, in order.

    They are told by their `layer_idx`. Layers of attention that hold another attention module (wrappers) are left out.
    """
    decoder = model.get_decoder()
    found: dict[int, list[nn.Module]] = {}
    for module in (decoder if isinstance(decoder, nn.Module) else model).modules():
        if _is_attention(module) and not any(_is_attention(inner) for inner in module.modules() if inner is not module):
            found.setdefault(int(module.layer_idx), []).append(module)  # type: ignore[arg-type]
    expected = range(len(spec.layers))
    if sorted(found) != list(expected) or any(len(modules) != 1 for modules in found.values()):
        counts = {index: len(modules) for index, modules in sorted(found.items())}
        raise UnsupportedFeatureError(
            f"{spec.name}: {type(model).__name__} has attention modules {counts} (layer: how many) for "
            f"{len(expected)} layers; models with one self-attention in each layer are supported"
        )
    modules = [found[index][0] for index in expected]
    if any(getattr(module, "is_causal", True) is False for module in modules):
        raise UnsupportedFeatureError(
            f"{spec.name}: {type(modules[0]).__name__} is not causal; decoder-only models with causal attention are supported"
        )
    return modules


def _is_attention(module: nn.Module) -> bool:
    index = getattr(module, "layer_idx", None)
    return isinstance(index, int) and (hasattr(module, "is_causal") or "attention" in type(module).__name__.lower())
