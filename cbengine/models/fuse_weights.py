"""Weights that a model of ours does without, since they are kept in packed matrices."""

from __future__ import annotations

import math

import torch
from torch import nn

from cbengine.kernels.decoder import Linear
from cbengine.kernels.matrix import PackedMatrix
from cbengine.kernels.table import EmbeddingTable


class GivenUp:
    """Which parameters were given up, and how to get them back.

    Such a parameter keeps its shape and holds no memory: all of its elements are one NaN, so that nothing computed with it
    can be mistaken for a result.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[torch.Tensor], PackedMatrix | EmbeddingTable]] = []

    @property
    def given_up(self) -> bool:
        """Whether the model lacks any weight."""
        return bool(self._kept)

    def give_up(self, linear: Linear, packed: PackedMatrix | EmbeddingTable) -> None:
        """Drop the weights of one linear layer (or the embedding), which `packed` holds exactly. Any thread."""
        if not all(isinstance(source, nn.Parameter) for source in linear.sources):
            return
        self._kept.append((linear.sources, packed))
        for source in linear.sources:
            hollow(source)

    def restore(self) -> None:
        """Give every weight back, bit by bit what it was."""
        for sources, packed in self._kept:
            whole = torch.cat(packed.unpack())
            for source, part in zip(sources, whole.split([s.shape[0] for s in sources]), strict=True):
                source.data = part.clone()
        self._kept.clear()


def hollow(parameter: torch.Tensor) -> None:
    """Take a parameter's memory from it."""
    parameter.data = torch.full((1,), math.nan).expand(parameter.shape)


def settle(model: nn.Module) -> None:
    """Move what is left of a model's weights to memory of its own.

    They may be parts of one mapped file, which the smallest of them would keep in memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size():  # not given up
            tensor.data = tensor.data.clone()
