"""One layer's pages, as the CPU kernels take them."""

from __future__ import annotations

import torch

from cbengine.kernels import library as lib


def pages_of(key: torch.Tensor, value: torch.Tensor) -> lib.Pages:
    """Views float32 [num_blocks, page_size, num_kv_heads, dim] whose last dimension is contiguous; strides are equal."""
    assert key.dtype == value.dtype == torch.float32 and key.stride() == value.stride() and key.stride(3) == 1
    return lib.Pages(
        key=key.data_ptr(),
        value=value.data_ptr(),
        block_stride=key.stride(0),
        token_stride=key.stride(1),
        head_stride=key.stride(2),
    )
