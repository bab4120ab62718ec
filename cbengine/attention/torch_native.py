"""torch's own kernel for packed queries over block tables: `torch.nn.attention.varlen.varlen_attn`, torch 2.12 and newer.

It is FlashAttention 2 inside torch, without soft cap. Pages are a multiple of 256 tokens. Unlike flash-attn's own
function it takes the lengths of the keys (`seqused_k`) beside their sums.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cbengine.attention.base import AttentionBackend, LayerKV, compute_capability
from cbengine.attention.packed import PackedStep, window_of

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs


def _varlen_attn() -> Callable[..., Any] | None:
    """The function, if this torch has it with block tables."""
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return function if {"block_table", "seqused_k"} <= set(inspect.signature(function).parameters) else None


class TorchBackend(AttentionBackend):
    """See the module's docstring."""

    name = "torch"
    page_size_multiple = 256
    supports_softcap = False
    supports_sinks = False
    paged_decode = True
    paged_prefill = True
    capturable = True
    devices = ("cuda",)
    dtypes = (torch.float16, torch.bfloat16)
    max_head_dim = 256
    head_dim_multiple = 8

    def __init__(self) -> None:
        function = _varlen_attn()
        assert function is not None
        self._function = function

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        capability = compute_capability(device)
        if capability is not None and capability < (8, 0):
            return f"is not for devices of compute capability {capability[0]}.{capability[1]}"
        if _varlen_attn() is None:
            return f"needs torch 2.12 or newer: that of torch {torch.__version__} takes no block tables"
        return None

    def begin(self, inputs: StepInputs, page_size: int) -> None:
        self._step = PackedStep(inputs, page_size)
        self._key_starts = None if _is_flash3() else self._step.key_starts

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        self._step.write(layer, key, value)

    def attend(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert softcap is None and sinks is None
        step = self._step
        left, right = window_of(window, step.max_context_len)
        if step.max_query_len > 1:
            right = 0  # here that alone says "causal"; for the newest token there is nothing to be said
        out = self._function(
            query,
            layer.key,
            layer.value,
            step.query_starts,
            self._key_starts,
            step.max_query_len,
            step.max_context_len,
            scale=scale,
            window_size=(left, right),
            enable_gqa=query.shape[1] != layer.key.shape[2],
            seqused_k=step.context_lens,
            block_table=step.tables,
        )
        return step.clean(out)


def _is_flash3() -> bool:
    """Whether somebody has put FlashAttention 3 in the kernel's place: it refuses sums of lengths beside block tables."""
    current = getattr(importlib.import_module("torch.nn.attention"), "current_flash_attention_impl", None)
    return current is not None and current() == "FA3"
