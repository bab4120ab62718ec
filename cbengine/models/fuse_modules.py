"""On a GPU, the parts that we know of a model that we don't: norms and feed-forward layers get a `forward` of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbengine.attention import LayerKV
from cbengine.execution.inputs import StepInputs
from cbengine.kernels.triton.activation import gated
from cbengine.kernels.triton.norm import MAX_WIDTH, RowNorm, norm
from cbengine.models.fuse_gpu import row_norm
from cbengine.models.fuse_recognise import NotRecognised, mlp_of, norm_of
from cbengine.models.fuse_source import is_known
from cbengine.models.merge import Merged


class FusedModules:
    """transformers' own forward over modules that are replaced. See `fuse.Fused`.

    Only calls that come from `forward` here go through the replacements: somebody else's, in another thread, run the
    modules themselves.

    Args:
        original: the model's own forward over the same pages.
        owned: the model is nobody else's: replacements stay between two servings.
    """

    capturable = True

    def __init__(self, model: PreTrainedModel, original: Callable[[StepInputs], Tensor], *, owned: bool) -> None:
        self._original = original
        self._owned = owned
        self._thread: int | None = None
        self._replaced: list[nn.Module] = []
        self._merged: list[Merged] = []
        decoder: Any = model.get_decoder()
        for module in decoder.modules():
            run = self._norm(module) or self._mlp(module)
            if run is not None:
                # Set on the module itself, it hides the class's `forward`.
                vars(module)["forward"] = self._guarded(module, run)
                self._replaced.append(module)

    def forward(self, inputs: StepInputs) -> Tensor:
        """As `ModelRunner.forward`. Compute stream's thread."""
        self._thread = threading.get_ident()
        try:
            return self._original(inputs)
        finally:
            self._thread = None

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        """Nothing here knows the cache."""

    def release(self) -> bool:
        """Put the modules back, unless the model is nobody else's (then False)."""
        if self._owned:
            return False
        self.undo()
        return True

    def undo(self) -> None:
        """Put the modules back, and split merged weights."""
        for module in self._replaced:
            vars(module).pop("forward", None)
        for merged in self._merged:
            merged.split()
        self._replaced.clear()
        self._merged.clear()

    def _guarded(self, module: nn.Module, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        plain = type(module).forward

        def forward(x: Tensor) -> Tensor:
            ours = threading.get_ident() == self._thread and not torch.is_grad_enabled()
            return run(x) if ours else plain(module, x)

        return forward

    @staticmethod
    def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
        try:
            own: RowNorm = row_norm(norm_of(module))
        except NotRecognised:
            return None
        if own.weight is not None and own.weight.shape[0] > MAX_WIDTH:
            return None
        return lambda x: norm(x.reshape(-1, x.shape[-1]), own).view(x.shape)

    def _mlp(self, module: nn.Module) -> Callable[[Tensor], Tensor] | None:
        if not is_known(module, "mlp"):
            return None
        try:
            gate_up, activation, down = mlp_of(module)
        except NotRecognised:
            return None
        both, last = Merged.of(gate_up), Merged.of(down)
        self._merged.append(both)

        def run(x: Tensor) -> Tensor:
            return last(gated(both(x.reshape(-1, x.shape[-1])), activation)).view(*x.shape[:-1], -1)

        return run
