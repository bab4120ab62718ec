"""From a transformers model to what it computes (`cbengine.kernels.decoder`), where we know every part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from cbengine.cache.geometry import group_of_layers
from cbengine.kernels.decoder import Activation, Attention, Decoder, Layer, Linear, Norm, NormKind, Rotary
from cbengine.models.base import ModelSpec
from cbengine.models.fuse_source import has_known_rope, is_known, source_of

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


class NotRecognised(Exception):
    """Which part of a model we do not know."""


def recognise(model: PreTrainedModel, spec: ModelSpec) -> Decoder:
    """The model as a `Decoder` that refers to its weights; nothing is copied or changed.

    Raises:
        NotRecognised: some part is not one that we know, or somebody has changed what it does.
    """
    network: Any = model
    decoder: Any = model.get_decoder()
    _require(is_known(network, "causal_lm") or is_known(network, "capped_causal_lm"), network)
    _require(is_known(decoder, "model") or is_known(decoder, "model_of_two_ropes"), decoder)
    _require(type(decoder.layers) is nn.ModuleList and len(decoder.layers) == len(spec.layers), decoder)
    embedding, head = decoder.embed_tokens, network.lm_head
    rotaries, tables = _rotaries(decoder, len(spec.layers))
    groups = group_of_layers(spec.layers)
    layers = [
        _layer(layer, spec, index, tables[index], rotaries, groups[index]) for index, layer in enumerate(decoder.layers)
    ]
    cap = getattr(network.config, "final_logit_softcapping", None) if is_known(network, "capped_causal_lm") else None
    return Decoder(
        embedding=_float(embedding.weight),
        embedding_scale=_embedding_scale(embedding),
        layers=layers,
        norm=norm_of(decoder.norm),
        head=_linear(head),
        head_cap=None if cap is None else float(cap),
        rotaries=rotaries,
        max_positions=spec.max_model_len,
    )


def _require(ok: bool, module: object) -> None:
    if not ok:
        raise NotRecognised(f"{type(module).__module__}.{type(module).__qualname__}")


def _float(tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotRecognised(f"a weight of {tensor.dtype} on {tensor.device}")
    return tensor


def _layer(layer: Any, spec: ModelSpec, index: int, table: int, rotaries: list[Rotary], group: int) -> Layer:
    four, late = is_known(layer, "layer_of_four_norms"), is_known(layer, "layer_of_late_norms")
    _require(four or late or is_known(layer, "layer"), layer)
    if four:
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    elif late:
        names = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    else:
        names = ("input_layernorm", "", "post_attention_layernorm", "")
    norms = [norm_of(getattr(layer, name)) if name else None for name in names]
    gate_up, activation, down = mlp_of(layer.mlp)
    attention = _attention(layer.self_attn, spec, index, table, rotaries[table], group)
    return Layer(
        qkv=_qkv(layer.self_attn, attention),
        attention=attention,
        out=_linear(layer.self_attn.o_proj),
        gate_up=gate_up,
        activation=activation,
        down=down,
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
    )


def _attention(module: Any, spec: ModelSpec, index: int, table: int, rotary: Rotary, group: int) -> Attention:
    _require(is_known(module, "attention") and has_known_rope(module), module)
    source, kv = source_of(module), spec.layers[index]
    _require(int(module.head_dim) == kv.head_dim, module)
    normed = "self.q_norm(" in source
    softcap = module.attn_logit_softcapping if "softcap=" in source else None
    clip = module.config.clip_qkv if "clip_qkv" in source else None
    rotated = 2 * rotary(1)[0].shape[1]
    _require(rotated <= kv.head_dim, module)
    return Attention(
        heads=spec.num_heads,
        kv_heads=kv.num_kv_heads,
        dim=kv.head_dim,
        rotary=rotated,
        table=table,
        group=group,
        scale=float(module.scaling),
        window=kv.window,
        softcap=None if softcap is None else float(softcap),
        query_norm=norm_of(module.q_norm) if normed else None,
        key_norm=norm_of(module.k_norm) if normed else None,
        clip=None if clip is None else float(clip),
    )


def _qkv(module: Any, attention: Attention) -> Linear:
    widths = [attention.heads * attention.dim, attention.kv_heads * attention.dim, attention.kv_heads * attention.dim]
    if hasattr(module, "qkv_proj"):
        linear = _linear(module.qkv_proj)
        _require([w.shape[0] for w in linear.weights] == [sum(widths)], module)
        return linear
    parts = [_linear(part) for part in (module.q_proj, module.k_proj, module.v_proj)]
    joined = Linear([w for part in parts for w in part.weights], [b for part in parts for b in part.biases])
    _require([w.shape[0] for w in joined.weights] == widths, module)
    return joined


def mlp_of(module: Any) -> tuple[Linear, Activation, Linear]:
    _require(is_known(module, "mlp"), module)
    if hasattr(module, "gate_up_proj"):
        whole, activation = _linear(module.gate_up_proj), module.activation_fn
        (weight,), (bias,) = whole.weights, whole.biases
        biases: list[torch.Tensor | None] = [None, None] if bias is None else [*bias.chunk(2)]
        gate_up = Linear(list(weight.chunk(2)), biases, sources=[weight])
    else:
        gate, up, activation = _linear(module.gate_proj), _linear(module.up_proj), module.act_fn
        gate_up = Linear(gate.weights + up.weights, gate.biases + up.biases)
    return gate_up, _activation(activation), _linear(module.down_proj)


def _activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation:
    """Which of ours it is, by what it does."""
    x = torch.linspace(-8, 8, 161)
    with torch.no_grad():
        y = function(x)
    for kind, ours in _ACTIVATIONS.items():
        if isinstance(y, torch.Tensor) and torch.allclose(y, ours(x), rtol=1e-5, atol=1e-6):
            return kind
    raise NotRecognised(f"activation {type(function).__qualname__}")


def _linear(module: nn.Module) -> Linear:
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    if type(module) is not nn.Linear or hooked:
        raise NotRecognised(f"{type(module).__module__}.{type(module).__qualname__} as a linear layer")
    return Linear([_float(module.weight)], [None if module.bias is None else _float(module.bias)])


def norm_of(module: Any) -> Norm:
    if is_known(module, "rms_norm"):
        first = "self.weight * hidden_states.to(input_dtype)" in source_of(module)
        return Norm(_float(module.weight), float(module.variance_epsilon), round_first=first)
    if is_known(module, "shifted_rms_norm"):
        weight = _float(module.weight).detach()
        return Norm(1.0 + weight.float(), float(module.eps), shifted=weight)
    if is_known(module, "plain_layer_norm"):
        return Norm(None, 1e-5, NormKind.LAYER)
    raise NotRecognised(f"{type(module).__module__}.{type(module).__qualname__}")


def _embedding_scale(embedding: Any) -> float:
    if type(embedding) is nn.Embedding and not embedding._forward_hooks and "forward" not in vars(embedding):
        return 1.0
    _require(is_known(embedding, "embedding"), embedding)
    scale: Any = vars(embedding)["_buffers"]["embed_scale"]
    return float(scale.float())


def _rotaries(decoder: Any, layers: int) -> tuple[list[Rotary], list[int]]:
    """The rotary embeddings of a model, and which one each layer uses."""
    if not is_known(decoder, "model_of_two_ropes"):
        return [_rotary(decoder.rotary_emb, ())], [0] * layers
    types = list(decoder.config.layer_types[:layers])
    distinct = sorted(set(types))
    return [_rotary(decoder.rotary_emb, (kind,)) for kind in distinct], [distinct.index(kind) for kind in types]


def _rotary(module: nn.Module, arguments: tuple[str, ...]) -> Rotary:
    """The model's own rotary embedding, asked for all positions at once."""

    def tables(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            cos, sin = module(torch.zeros(1), torch.arange(n)[None], *arguments)
        half = cos.shape[-1] // 2
        if not (torch.equal(cos[..., :half], cos[..., half:]) and torch.equal(sin[..., :half], sin[..., half:])):
            raise NotRecognised(f"{type(module).__qualname__}: its halves differ")
        return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()

    return tables
