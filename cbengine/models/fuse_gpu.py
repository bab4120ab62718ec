"""Makes a model fast on a GPU without changing what it computes.

A model whose every part we know (`fuse_recognise.py`) is run from the embedding to the logits by few, large operations:
one product each for queries, keys and values together and for gate and up together, and between the products our Triton
kernels (`cbengine.kernels.triton`), which also write the pages. The attention backend attends, as ever. Nothing waits for
the device and every shape follows from the step's sizes, so a CUDA graph may capture the whole.

Weights stay where they can be seen: the parameters of merged layers become views of the merged weight, and norms read the
model's own tensors. So no weight is held twice, others can call the model meanwhile, and weights that are written in
place (training, `load_state_dict`) count from the next step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from cbengine.attention import AttentionBackend, LayerKV
from cbengine.execution.inputs import StepInputs
from cbengine.kernels.decoder import Activation, Attention, Layer, Norm, NormKind
from cbengine.kernels.reference import soft_cap
from cbengine.kernels.triton.activation import gated
from cbengine.kernels.triton.norm import MAX_WIDTH, RowNorm, join, norm
from cbengine.kernels.triton.rope import Heads, kv_slots, rotate_and_write
from cbengine.models.base import ModelSpec
from cbengine.models.fuse_recognise import NotRecognised, recognise
from cbengine.models.fuse_source import is_known
from cbengine.models.merge import Merged


@dataclass(slots=True)
class _Layer:
    """One layer, ready to run."""

    qkv: Merged
    out: Merged
    gate_up: Merged
    down: Merged
    attention: Attention
    heads: Heads
    query_norm: RowNorm | None
    key_norm: RowNorm | None
    """Norms over all heads of a token together; those of each head are in `heads`."""
    activation: Activation
    before_attention: RowNorm | None
    after_attention: RowNorm | None
    before_mlp: RowNorm | None
    after_mlp: RowNorm | None


class FusedGpu:
    """A whole model over Triton kernels. See `fuse.Fused`; compute stream's thread.

    Args:
        owned: the model is nobody else's: merged weights stay merged between two servings.

    Raises:
        NotRecognised: some part of the model is not one that we know. Nothing was changed then.
    """

    capturable = True

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, backends: Sequence[AttentionBackend], *, owned: bool
    ) -> None:
        decoder = recognise(model, spec)
        self._rotary, self._rotary_arguments = _rotary(model, spec)
        if max(spec.hidden_size, *(spec.num_heads * layer.head_dim for layer in spec.layers)) > MAX_WIDTH:
            raise NotRecognised(f"rows of more than {MAX_WIDTH} elements")
        dtype = decoder.embedding.dtype
        self._backends = backends
        self._owned = owned
        self._embedding = decoder.embedding.detach()
        self._scale = float(torch.tensor(decoder.embedding_scale, dtype=dtype))
        self._norm = row_norm(decoder.norm)
        self._cap = decoder.head_cap
        self._layers: list[_Layer] = []
        try:
            for layer in decoder.layers:
                self._layers.append(_layer(layer, dtype))
        except BaseException:
            self.undo()
            raise
        self._head = Merged.of(decoder.head)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of `inputs.sample_index`, [N + P, vocabulary] in the model's dtype."""
        slots = []
        for group, backend in enumerate(self._backends):
            step = inputs.of_group(group)
            backend.begin(step, self._page_size)
            slots.append(getattr(backend, "slots", None) or kv_slots(step, self._page_size))
        x = F.embedding(inputs.token_ids, self._embedding)
        if self._scale != 1.0:
            x = x * self._scale
        angles = self._angles(x, inputs.positions)
        total, y = join(None, x, None, self._layers[0].before_attention)
        total = x
        for index, layer in enumerate(self._layers):
            last = index + 1 == len(self._layers)
            y = self._attend(index, layer, y, angles[layer.attention.table], slots[layer.attention.group])
            if last:  # what follows concerns each token alone, so only those that count
                chosen = inputs.sample_index.long()
                y, total = y[chosen], total[chosen]
            total, y = join(total, layer.out(y), layer.after_attention, layer.before_mlp)
            y = layer.down(gated(layer.gate_up(y), layer.activation))
            following = self._norm if last else self._layers[index + 1].before_attention
            total, y = join(total, y, layer.after_mlp, following)
        return soft_cap(self._head(y), self._cap)

    def _angles(self, x: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine [T, rotary] of each table, by the model's own rotary embedding."""
        both = [self._rotary(x[None], positions[None], *arguments) for arguments in self._rotary_arguments]
        return [(cos[0], sin[0]) for cos, sin in both]

    def _attend(
        self, index: int, layer: _Layer, x: Tensor, angles: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor]
    ) -> Tensor:
        """From the normed rows [T, hidden] to the heads' results [T, heads * dim]."""
        a, kv, qkv = layer.attention, self._kv[index], layer.qkv(x)
        start, width = 0, a.heads * a.dim
        for own in (layer.query_norm, layer.key_norm):
            if own is not None:
                part = qkv[:, start : start + width]
                norm(part, own, out=part)
            start, width = width, a.kv_heads * a.dim
        query = rotate_and_write(qkv, *angles, layer.heads, kv.key, kv.value, *slots)
        backend = self._backends[a.group]
        found = backend.attend(kv, query, scale=a.scale, window=a.window, softcap=a.softcap, sinks=a.sinks)
        return found.flatten(1)

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        """Use another cache from now on."""
        self._kv, self._page_size = layers, page_size

    def release(self) -> bool:
        """Give the model memory of its own for each weight again, unless it is nobody else's (then False)."""
        if self._owned:
            return False
        self.undo()
        return True

    def undo(self) -> None:
        """Split the merged weights. This cannot be used any more."""
        for layer in self._layers:
            for merged in (layer.qkv, layer.gate_up):
                merged.split()


def row_norm(own: Norm) -> RowNorm:
    """A recognised norm for the kernels."""
    weight = own.weight if own.shifted is None else own.shifted
    if own.bias is not None:
        raise NotRecognised("a norm with a bias")
    return RowNorm(
        None if weight is None else weight.detach(),
        own.eps,
        shift=own.shifted is not None,
        round_first=own.round_first,
        center=own.kind is NormKind.LAYER,
    )


def _layer(layer: Layer, dtype: torch.dtype) -> _Layer:
    a = layer.attention
    whole = a.norm_whole
    query_norm, key_norm = (None if own is None else row_norm(own) for own in (a.query_norm, a.key_norm))
    around = [
        None if own is None else row_norm(own)
        for own in (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
    ]
    clip = None if a.clip is None else float(torch.tensor(a.clip, dtype=dtype))
    heads = Heads(a.heads, a.kv_heads, a.dim, None if whole else query_norm, None if whole else key_norm, clip)
    if whole and clip is not None:  # the bound comes first
        raise NotRecognised("norms of all heads together, and a bound")
    return _Layer(
        Merged.of(layer.qkv),
        Merged.of(layer.out),
        Merged.of(layer.gate_up),
        Merged.of(layer.down),
        a,
        heads,
        query_norm if whole else None,
        key_norm if whole else None,
        layer.activation,
        *around,
    )


def _rotary(model: PreTrainedModel, spec: ModelSpec) -> tuple[Any, list[tuple[str, ...]]]:
    """The model's rotary embedding, and its last argument for each of the decoder's tables."""
    found: Any = model.get_decoder()
    kind = str(getattr(found.rotary_emb, "rope_type", ""))
    if "dynamic" in kind or "longrope" in kind:
        # They look at the longest sequence of the batch, on the host.
        raise NotRecognised(f"rotary embeddings of type {kind}")
    if not is_known(found, "model_of_two_ropes"):
        return found.rotary_emb, [()]
    types = list(found.config.layer_types[: len(spec.layers)])
    return found.rotary_emb, [(name,) for name in sorted(set(types))]
