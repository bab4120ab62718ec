"""Linear layers with the same input as one, whose parameters remain the model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cbengine.kernels.decoder import Linear


@dataclass(slots=True)
class Merged:
    """One product for several layers: [T, depth] to [T, sum of columns].

    The layers' parameters are views of `weight` and `bias`, row after row; of a single layer they are its own tensors.
    """

    weight: Tensor
    bias: Tensor | None
    parts: list[tuple[Tensor, Tensor]]
    """Parameters of the model, and the views that they were given."""

    @classmethod
    def of(cls, linear: Linear) -> Merged:
        """Merge. Engine thread; the weights must be the model's own tensors, or parts of a single one."""
        with torch.inference_mode(False), torch.no_grad():
            if len(linear.sources) == 1:
                weight = linear.sources[0].detach()
                biases = [bias for bias in linear.biases if bias is not None]
                bias = torch.cat([bias.detach() for bias in biases]) if len(biases) > 1 else None
                return cls(weight, biases[0].detach() if len(biases) == 1 else bias, [])
            weight, parts = _joined(linear.sources)
            bias = None
            if any(b is not None for b in linear.biases):
                pairs = zip(linear.biases, linear.weights, strict=True)
                bias, own = _joined([w.new_zeros(w.shape[0]) if b is None else b for b, w in pairs])
                parts += own
            return cls(weight, bias, parts)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def split(self) -> None:
        """Give every parameter memory of its own again. One that somebody has given other memory meanwhile keeps that."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter, view in self.parts:
                if parameter.data_ptr() == view.data_ptr():
                    parameter.data = parameter.data.clone()
        self.parts.clear()


def _joined(tensors: list[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """All rows in one tensor, of which the given ones become views."""
    whole = torch.cat([t.detach() for t in tensors])
    parts = list(zip(tensors, whole.split([t.shape[0] for t in tensors]), strict=True))
    for tensor, view in parts:
        tensor.data = view
    return whole, parts
