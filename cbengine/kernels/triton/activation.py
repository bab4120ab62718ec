"""The gated activations of feed-forward layers: `activation(gate) * up`, where both stand side by side in a row."""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cbengine.kernels.decoder import Activation

_CODES = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.RELU: 2}


def gated_reference(gate_up: Tensor, kind: Activation) -> Tensor:
    """`gated` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind is Activation.SILU:
        return F.silu(gate) * up
    return (F.relu(gate) if kind is Activation.RELU else F.gelu(gate, approximate="tanh")) * up


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        # 0.5 x (1 + tanh y) = x / (1 + exp(-2 y)), which keeps its digits where tanh nears -1.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        gate = tl.maximum(gate, 0.0)
    tl.store(out_ptr + row * width + at, (gate.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def gated(gate_up: Tensor, kind: Activation) -> Tensor:
    """[T, 2 * width] to [T, width]: gates in the first half of a row, what they multiply in the second. Compute stream.

    float32 within, rounded to the dtype after the activation and after the product, as two operations of torch would.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and gate_up.shape[1] == 2 * width, (gate_up.shape, gate_up.stride())
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _gated_kernel[grid](gate_up, out, gate_up.stride(0), width, KIND=_CODES[kind], BLOCK=block)
    return out
