"""Weights that a model of ours does without, since they are kept in packed matrices."""

from __future__ import annotations

import math

import torch
from torch import nn

from cbengine.kernels.decoder import Linear
from cbengine.kernels.matrix import PackedMatrix


class GivenUp:
    """Which parameters were given up, and how to get them back.

    Such a parameter keeps its shape and holds no memory: all of its elements are one NaN, so that nothing computed with it
    can be mistaken for a result.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[torch.Tensor], PackedMatrix]] = []

    @property
    def given_up(self) -> bool:
        """Whether the model lacks any weight."""
        return bool(self._kept)

    def give_up(self, linear: Linear, packed: PackedMatrix) -> None:
        """Drop the weights of one linear layer, which `packed` holds exactly."""
        if not all(isinstance(source, nn.Parameter) for source in linear.sources):
            return
        self._kept.append((linear.sources, packed))
        for source in linear.sources:
            source.data = torch.full((1,), math.nan).expand(source.shape)

    def restore(self) -> None:
        """Give every weight back, bit by bit what it was."""
        for sources, packed in self._kept:
            whole = torch.cat(packed.unpack())
            for source, part in zip(sources, whole.split([s.shape[0] for s in sources]), strict=True):
                source.data = part.clone()
        self._kept.clear()
