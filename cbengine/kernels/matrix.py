"""Weights of linear layers, packed for the CPU kernels: half as large where that is exact, and read in the order of use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from cbengine.kernels import library as lib
from cbengine.kernels.library import Library
from cbengine.kernels.team import address, check, pointer, team_of_thread

_FORMATS = {
    lib.BF16: "bfloat16",
    lib.F16: "float16",
    lib.CODES4: "4 bits in groups of 32",
    lib.CODES8: "8 bits in groups of 32",
    lib.CODES8_SHORT: "8 bits in groups of 16",
    lib.F32: "float32",
}
"""In the order in which they are tried; float32 holds everything."""
_INT8 = "8 bits for each column"


class PackedMatrix:
    """The weight and bias of one linear layer, or of several side by side that have the same input.

    The weights are kept in the first of these that holds every one of them exactly: bfloat16, float16, small integers with
    a scale and an offset for each group (what most quantised checkpoints unpack to), float32. Arithmetic is float32. A
    product's row does not depend, bit by bit, on the other rows, on their number, or on the number of threads.

    With `int8` they are whole numbers from -127 to 127 and a scale for each column, and the rows that they are multiplied by
    become whole numbers too, with a scale for each 64 elements (as in "dynamic quantisation" elsewhere): less exact, and
    faster. See `reference.int8_linear`.

    Args:
        weights: float32 [n_i, depth] each. They are put side by side; with `gated` they are two of the same shape, the gate
            and the factor of a gated feed-forward layer.
        biases: for each weight its bias float32 [n_i], or None.

    Raises:
        ValueError: with `int8`, a weight is not finite.
    """

    def __init__(
        self,
        library: Library,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        *,
        gated: bool = False,
        int8: bool = False,
    ) -> None:
        assert all(w.dtype == torch.float32 and w.shape[1] == weights[0].shape[1] for w in weights)
        assert not gated or (len(weights) == 2 and weights[0].shape == weights[1].shape)
        self.library = library
        self.gated = gated
        self.int8 = int8
        self.depth = int(weights[0].shape[1])
        self.sizes = [int(w.shape[0]) for w in weights]
        self.columns = self.sizes[0] if gated else sum(self.sizes)
        """Width of the output: of the product of gate and factor, if gated."""
        self.structure = lib.Matrix(columns=self.columns, depth=self.depth, gated=gated)
        self.data = self._pack([w.detach().contiguous() for w in weights])
        self.bias = self._pack_bias(biases or [None] * len(weights))
        self.structure.bias = address(self.bias)

    @property
    def format_name(self) -> str:
        """How the weights are kept, for people."""
        return _INT8 if self.int8 else _FORMATS[self.structure.format]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def _parts(self) -> list[tuple[int, int, int]]:
        """For each weight: first column, number of columns, which part of a gated matrix."""
        if self.gated:
            return [(0, self.columns, lib.GATE), (0, self.columns, lib.UP)]
        firsts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [(first, size, lib.WHOLE) for first, size in zip(firsts, self.sizes, strict=True)]

    def _pack(self, weights: list[torch.Tensor]) -> torch.Tensor:
        for kind in (lib.INT8,) if self.int8 else _FORMATS:
            self.structure.format = kind
            size = self.library.packed_bytes(self.columns, self.depth, kind, self.gated)
            data = torch.zeros(size, dtype=torch.uint8)
            self.structure.data = address(data)
            if size and all(
                self.library.pack(pointer(self.structure), address(data), address(weight), *part)
                for weight, part in zip(weights, self._parts(), strict=True)
            ):
                return data
        assert self.int8, "float32 holds everything"
        raise ValueError("a weight is infinite or not a number")

    def _pack_bias(self, biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        if all(bias is None for bias in biases):
            return None
        flat = [torch.zeros(n) if b is None else b.detach().float() for n, b in zip(self.sizes, biases, strict=True)]
        width = self.library.width // 2 if self.gated else self.library.width
        if not self.gated:
            flat = [torch.cat(flat)]
        panels = -(-self.columns // width)
        parts = [torch.nn.functional.pad(part, (0, panels * width - self.columns)).view(panels, width) for part in flat]
        return torch.cat(parts, dim=1).flatten().contiguous()

    def unpack(self) -> list[torch.Tensor]:
        """The weights as they were (with `int8`: nearly), float32 [n_i, depth] each."""
        weights = [torch.empty(size, self.depth) for size in self.sizes]
        for weight, part in zip(weights, self._parts(), strict=True):
            self.library.unpack(pointer(self.structure), address(weight), *part)
        return weights

    def product(self, x: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """`x` [rows, depth] float32 times the weights, plus the bias: [rows, columns]. Any thread.

        A gated matrix gives activation(gate) * factor.
        """
        assert x.dtype == torch.float32 and x.ndim == 2 and x.shape[1] == self.depth
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.columns)
        if x.shape[0]:
            source, before = x, None
            if self.int8:
                source = torch.empty(x.shape[0], self.library.row_words(self.depth), dtype=torch.int32)
                before = lib.Quantize(x.data_ptr(), source.data_ptr(), x.stride(0), source.stride(0), self.depth)
            task = lib.Product(
                x=source.data_ptr(),
                out=out.data_ptr(),
                x_stride=source.stride(0),
                out_stride=self.columns,
                rows=x.shape[0],
                matrix=self.structure,
                epilogue=lib.GATED if self.gated else lib.STORE,
                activation=lib.ACTIVATIONS[activation],
            )
            first = None if before is None else pointer(before)
            check(self.library.product(team_of_thread(self.library), first, ctypes.byref(task)))
        return out
