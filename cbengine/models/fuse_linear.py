"""Linear layers of any model, replaced one by one by products with packed weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from cbengine.kernels.decoder import Linear
from cbengine.kernels.library import Library
from cbengine.kernels.matrix import PackedMatrix
from cbengine.models.fuse_weights import GivenUp

_SMALLEST = 1 << 14  # elements of a weight; smaller ones are not worth a call


class PackedLinears:
    """Gives the linear layers of a model a `forward` of their own, until `release`.

    Args:
        owned: the model is nobody else's: weights that nothing else uses are dropped once they are packed.
    """

    def __init__(self, library: Library, model: PreTrainedModel, *, owned: bool) -> None:
        self._weights = GivenUp()
        self._replaced: list[nn.Linear] = []
        uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        # Not the towers for images or sound that a model may have beside its decoder.
        roots = [root for root in (model.get_decoder(), model.get_output_embeddings()) if isinstance(root, nn.Module)]
        for module in {module: None for root in roots for module in root.modules()}:
            if not _can_replace(module):
                continue
            assert isinstance(module, nn.Linear)
            linear = Linear([module.weight], [module.bias])
            packed = PackedMatrix(library, linear.weights, linear.biases)
            # Set on the module itself, it hides the class's `forward`.
            vars(module)["forward"] = _forward(module, packed)
            self._replaced.append(module)
            if owned and uses[id(module.weight)] == 1:
                self._weights.give_up(linear, packed)

    def release(self) -> bool:
        """Put the layers back, unless they have given up their weights (then False)."""
        if self._weights.given_up:
            return False
        for module in self._replaced:
            vars(module).pop("forward", None)
        self._replaced.clear()
        return True

    def undo(self) -> None:
        """Put the layers back, and their weights."""
        self._weights.restore()
        self.release()


def _can_replace(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= _SMALLEST


def _forward(module: nn.Linear, packed: PackedMatrix) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        # Somebody who trains the model, or gives it another dtype, wants the layer itself.
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return nn.functional.linear(x, module.weight, module.bias)
        return packed.product(x.reshape(-1, packed.depth)).view(*x.shape[:-1], packed.columns)

    return forward
