"""What the engine needs from a model, and no more. `TransformersRunner` and `cbengine.testing.FakeModel` provide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer, as the cache has to know it."""

    kind: str
    """"full_attention" or "sliding_attention", as in a transformers config's `layer_types`."""
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window in tokens, the token itself included; None for full attention."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model that sizes, limits and defaults are derived from."""

    name: str
    layers: tuple[LayerSpec, ...]
    num_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and answer together, that the model was made for."""
    kv_dtype: torch.dtype
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float | int]
    """Sampling defaults from the checkpoint's generation config, under `SamplingParams`' names."""
    softcap: float | None = None
    """Bound of the attention scores, if the model has one. An attention backend has to know how."""
    has_sinks: bool = False
    """Attention scores that no value belongs to (GPT-OSS). Likewise."""
    num_rotaries: int = 1
    """Rotary embeddings: one, or one for each type of layer. Sizes the memory of a step."""

    @property
    def layer_weights(self) -> int:
        """Weights that every token is multiplied with in all layers together; a gated MLP is assumed."""
        count = 0
        for layer in self.layers:
            width, kv_width = self.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            count += self.hidden_size * (2 * width + 2 * kv_width + 3 * self.intermediate_size)
        return count

    @property
    def attention_reach(self) -> int:
        """Tokens of context whose attention takes as many multiplications as all else that a token goes through.

        Layers with a window are left out, as their attention stays small.
        """
        attention = sum(2 * self.num_heads * layer.head_dim for layer in self.layers if layer.window is None)
        return max(1, self.layer_weights // max(1, attention))


class ModelRunner(Protocol):
    """Runs one packed step. `bind` is called once by the engine thread, `forward` on the compute stream.

    One that has an attribute `page_size_multiple` gets pages of a multiple of so many tokens.
    """

    spec: ModelSpec

    @property
    def capturable(self) -> bool:
        """Whether a graph may capture `forward`: of the inputs it looks at device tensors and at the sizes of the step alone,
        at no host array and at no value in a device tensor. Asked once, after `bind`."""
        ...

    def bind(self, kv: list[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        """Give each layer its part of the cache: K and V of shape [num_blocks, page_size, num_kv_heads, head_dim].

        Views into one flat pool: the innermost two dimensions are contiguous, the strides of the others are free. Blocks are
        numbered anew in each attention type, whose layers share a block table (`StepInputs.of_group`).
        """
        ...

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Write K and V of the step's tokens into their pages, attend, and return the logits of
        `inputs.sample_index`, [N + P, vocab_size]."""
        ...

    def release(self) -> None:
        """Undo `bind` and whatever was changed in a model that belongs to the caller. Idempotent."""
        ...
