"""An embedding that is no output matrix as well."""

from __future__ import annotations

import torch

from cbengine.kernels import library as lib

_ROWS = 4096  # looked at together, so that checking a large table takes little memory


class EmbeddingTable:
    """[vocabulary, hidden], in half of float32's size if that is exact."""

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        assert weight.dtype == torch.float32 and weight.ndim == 2
        kinds = {torch.bfloat16: lib.BF16, torch.float16: lib.F16, torch.float32: lib.F32}
        dtype = next(dtype for dtype in kinds if is_exact(weight, dtype))
        # A copy even if nothing changes: the original belongs to the model.
        self.data = torch.empty(weight.shape, dtype=dtype).copy_(weight)
        self.structure = lib.Matrix(columns=weight.shape[0], depth=weight.shape[1], format=kinds[dtype])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def unpack(self) -> list[torch.Tensor]:
        """The table as it was, float32 [vocabulary, hidden], alone in a list (as `PackedMatrix.unpack`)."""
        return [self.data.float()]


def is_exact(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every element of a float32 matrix survives being kept as `dtype`."""
    if dtype == torch.float32:
        return True
    return all(torch.equal(rows.to(dtype).float(), rows) for rows in weight.split(_ROWS))
