"""The same decoder in plain torch: what the kernels are tested against, and what runs where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cbengine.kernels.decoder import Activation, Decoder, Layer, Linear, Norm, NormKind, RotaryTables
from cbengine.kernels.table import is_exact

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Writes the keys and values of one layer into its pages and attends: (layer, query, key, value), each [T, heads, dim]."""

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


def norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Over the last dimension, in float32."""
    if norm.kind is NormKind.LAYER:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    y = y if norm.weight is None else y * norm.weight
    return y if norm.bias is None else y + norm.bias


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [T, heads, dim], of which the first 2 * `cos.shape[1]` elements are rotated, half against half. `cos` [T, n]."""
    n = cos.shape[1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Bounded to (-cap, cap) by tanh."""
    return x if cap is None else cap * torch.tanh(x / cap)


class TorchLinear:
    """Linear layers side by side, as float16 weights with float32 arithmetic where that is exact and torch can.

    fbgemm's operation reads half the memory and is faster than the float32 one at every size (measured on AVX2 and AVX-512).
    The weights that are kept as they are, are those of the model: `shared` says so of a weight that is needed anyway.
    """

    def __init__(self, linear: Linear, *, shared: bool = False) -> None:
        self.bias = _join_biases(linear)
        self.weight: torch.Tensor | None = None
        self.packed: Any = None
        weight = linear.weights[0] if len(linear.weights) == 1 else torch.cat([w.detach() for w in linear.weights])
        self.columns = weight.shape[0]
        if not shared and _has_half_linear() and is_exact(weight.detach(), torch.float16):
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), self.bias)
        else:
            self.weight = weight.detach()
        linear.weights, linear.sources = [], []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and x.shape[0]:
            return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        if self.packed is not None:
            return x.new_zeros(0, self.columns)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


class PlainLinear:
    """Linear layers side by side, over the model's own weights."""

    def __init__(self, linear: Linear, *, shared: bool = False) -> None:
        self._parts = list(zip(linear.weights, linear.biases, strict=True))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(x, weight, bias) for weight, bias in self._parts], dim=-1)


class Int8Linear:
    """The same with 8-bit weights and activations, see `int8_linear`."""

    def __init__(self, linear: Linear, *, shared: bool = False) -> None:
        self._weight = torch.cat([w.detach() for w in linear.weights])
        self._bias = _join_biases(linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x, self._weight, self._bias)


INT8_GROUP = 64
"""Elements of a row of activations that share a scale."""


def int8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [n, depth] to whole numbers -127 … 127 (as float32) and one scale for each row, float32 [n, 1]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return torch.where(scale > 0, weight / scale, 0.0).round().clamp(-127, 127), scale


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations float32 [rows, depth] to whole numbers -127 … 127, as float32 [rows, groups, 64], and scales [rows, groups].

    The last group is filled up with zeros. A group with nothing over 1e-30 is 0; one that holds an infinity or a NaN has a
    NaN for its scale.
    """
    groups = F.pad(x, (0, -x.shape[1] % INT8_GROUP)).unflatten(1, (-1, INT8_GROUP))
    finite = groups.isfinite().all(dim=2)
    most = groups.abs().amax(dim=2)
    some = finite & (most > 1e-30)
    factor = torch.where(some, torch.full_like(most, 127) / most, 0.0)  # 127 / most would be most.reciprocal() * 127
    codes = torch.where(some[..., None], (groups * factor[..., None]).clamp(-127, 127), 0.0).round()
    scale = torch.where(some, most / 127, 0.0)
    return codes, torch.where(finite, scale, torch.nan)


def int8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [rows, depth] times `weight` [n, depth] transposed, plus the bias, float32: what `PackedMatrix` with `int8` computes.

    The sum of a group's products is an exact integer. The groups' sums, each times its scale, are added up in float32 and
    multiplied by the weight's scale.
    """
    rows, row_scales = int8_rows(x)
    codes, scale = int8_weight(weight)
    columns = F.pad(codes, (0, -x.shape[1] % INT8_GROUP)).unflatten(1, (-1, INT8_GROUP))
    sums = torch.einsum("rgk,ngk->rng", rows, columns)  # float32 is exact here: below 2^24
    out = (sums * row_scales[:, None]).sum(dim=2) * scale.T
    return out if bias is None else out + bias


class TorchDecoder:
    """See `decoder.py`. The attention over pages is the caller's, one call for each layer.

    Args:
        decoder: taken over; the weights of its linear layers may be dropped from it.
        kind: how linear layers are computed.
    """

    def __init__(
        self, decoder: Decoder, kind: type[TorchLinear] | type[PlainLinear] | type[Int8Linear] = TorchLinear
    ) -> None:
        self._decoder = decoder
        # A tied table is read by rows too, so it stays as it is.
        self._head = kind(decoder.head, shared=decoder.tied)
        self._layers = [
            tuple(kind(linear) for linear in (layer.qkv, layer.out, layer.gate_up, layer.down))
            for layer in decoder.layers
        ]
        self._rotary = RotaryTables(decoder.rotaries, decoder.max_positions)

    def forward(self, inputs: StepInputs, attend: Attend) -> torch.Tensor:
        """Logits of `inputs.sample_index`, float32 [N + P, vocabulary]."""
        d = self._decoder
        x = F.embedding(inputs.token_ids.long(), d.embedding) * d.embedding_scale
        positions = inputs.positions.long()
        self._rotary.grow(int(positions.max()) + 1)
        tables = [tuple(t[positions] for t in both) for both in self._rotary.tables]
        for index, (layer, (qkv, out, gate_up, down)) in enumerate(zip(d.layers, self._layers, strict=True)):
            y = x if layer.before_attention is None else norm(x, layer.before_attention)
            y = self._attention(index, layer, qkv(y), tables[layer.attention.table], attend)
            if index == len(d.layers) - 1:  # nobody asks for more than the logits of these
                x, y = (t[inputs.sample_index.long()] for t in (x, y))
            y = out(y)
            x = x + (y if layer.after_attention is None else norm(y, layer.after_attention))
            y = x if layer.before_mlp is None else norm(x, layer.before_mlp)
            gate, up = gate_up(y).chunk(2, dim=-1)
            y = down(_ACTIVATIONS[layer.activation](gate) * up)
            x = x + (y if layer.after_mlp is None else norm(y, layer.after_mlp))
        return soft_cap(self._head(norm(x, d.norm)), d.head_cap)

    def _attention(
        self, index: int, layer: Layer, qkv: torch.Tensor, table: tuple[torch.Tensor, ...], attend: Attend
    ) -> torch.Tensor:
        a = layer.attention
        if a.clip is not None:
            qkv = qkv.clamp(-a.clip, a.clip)
        query, key, value = qkv.split([a.heads * a.dim, a.kv_heads * a.dim, a.kv_heads * a.dim], dim=-1)

        def heads(x: torch.Tensor, own: Norm | None) -> torch.Tensor:
            if own is not None and a.norm_whole:
                x, own = norm(x, own), None
            x = x.unflatten(-1, (-1, a.dim))
            return x if own is None else norm(x, own)

        query, key = (rotate(heads(x, own), *table) for x, own in ((query, a.query_norm), (key, a.key_norm)))
        return attend(index, query, key, heads(value, None)).flatten(1)


def _join_biases(linear: Linear) -> torch.Tensor | None:
    if all(bias is None for bias in linear.biases):
        return None
    pairs = zip(linear.weights, linear.biases, strict=True)
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b.detach() for w, b in pairs])


def _has_half_linear() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
