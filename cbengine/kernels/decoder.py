"""What a decoder-only transformer computes, as plain data: the input of `native.py` and `reference.py`.

    x = embedding[ids] * embedding_scale
    for each layer:
        x += after_attention(out(attention(rope(clip(qkv(before_attention(x)))))))
        x += after_mlp(down(activation(gate(before_mlp(x))) * up(before_mlp(x))))
    logits = cap(head(norm(x[sampled])))

(after the last attention, all of it for the sampled tokens alone), where each of the four norms of a layer may be missing,
and queries and keys may have a norm of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch


class NormKind(Enum):
    """What a norm divides by: the root of the mean square, or the standard deviation after taking off the mean."""

    RMS = "rms"
    LAYER = "layer"


class Activation(Enum):
    """What the gate of a feed-forward layer goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(slots=True)
class Norm:
    """`weight` and `bias`: float32 [width], or None for 1 and 0."""

    weight: torch.Tensor | None
    eps: float
    kind: NormKind = NormKind.RMS
    bias: torch.Tensor | None = None
    shifted: torch.Tensor | None = None
    """The model's own tensor, where `weight` is 1 + it."""
    round_first: bool = False
    """In half precision the normed row is rounded before it is multiplied by the weight, not only after."""


@dataclass(slots=True)
class Linear:
    """Linear layers with the same input, side by side: weights float32 [n_i, depth], biases [n_i] or None."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    sources: list[torch.Tensor] = field(default_factory=list)
    """The model's own tensors that the weights are (parts of), in the same order; default: the weights."""

    def __post_init__(self) -> None:
        self.sources = self.sources or list(self.weights)


@dataclass(slots=True)
class Attention:
    """Everything between the qkv product and the output product of one layer."""

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    """How many of a head's `dim` elements are rotated, from the first on; even."""
    table: int
    """Which of `Decoder.rotaries` gives cosine and sine."""
    group: int
    """Which of the step's block tables the layer reads (`StepInputs.of_group`)."""
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    """RMS norms of each head, or of all heads of a token together: told by the width of their weight."""
    clip: float | None = None
    """Queries, keys and values are kept within ±clip."""

    @property
    def norm_whole(self) -> bool:
        """True if the norm is over all heads together."""
        weight = None if self.query_norm is None else self.query_norm.weight
        return weight is not None and weight.shape[0] == self.heads * self.dim and self.heads > 1


@dataclass(slots=True)
class Layer:
    """One layer. `gate_up` holds two weights of the same shape."""

    qkv: Linear
    attention: Attention
    out: Linear
    gate_up: Linear
    activation: Activation
    down: Linear
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


Rotary = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Cosine and sine for the positions 0 … n - 1: float32 [n, rotary / 2] each."""


class RotaryTables:
    """Cosine and sine for as many positions as have been asked for, and some more."""

    def __init__(self, rotaries: list[Rotary], max_positions: int) -> None:
        self._rotaries = rotaries
        self._max_positions = max_positions
        self.rows = 0
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []

    def grow(self, rows: int) -> bool:
        """Have at least `rows` positions. True if the tables are new ones."""
        if rows <= self.rows:
            return False
        ample = min(max(512, 1 << (rows - 1).bit_length()), self._max_positions)
        self.rows = max(rows, ample)
        self.tables = [rotary(self.rows) for rotary in self._rotaries]
        return True


@dataclass(slots=True)
class Decoder:
    """A whole model. `head` has one weight; it may be the same tensor as `embedding` [vocabulary, hidden]."""

    embedding: torch.Tensor
    embedding_scale: float
    layers: list[Layer]
    norm: Norm
    head: Linear
    head_cap: float | None
    rotaries: list[Rotary]
    max_positions: int
    """Longest sequence; rotary embeddings are asked for no more, since some change with that."""

    @property
    def tied(self) -> bool:
        return self.head.weights[0] is self.embedding
