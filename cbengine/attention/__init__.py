"""Paged attention backends, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cbengine.attention.base import AttentionBackend, LayerKV
from cbengine.attention.cpu import CpuBackend
from cbengine.attention.eager import EagerBackend
from cbengine.attention.sdpa import SdpaBackend
from cbengine.errors import UnsupportedFeatureError
from cbengine.kernels.library import get_library

if TYPE_CHECKING:
    from cbengine.models.base import ModelSpec

__all__ = ["AttentionBackend", "LayerKV", "available", "choose"]

_ALL: tuple[type[AttentionBackend], ...] = (CpuBackend, EagerBackend, SdpaBackend)
_BACKENDS = {backend.name: backend for backend in _ALL}


def available() -> list[str]:
    """Names that `choose` accepts, sorted."""
    return sorted(_BACKENDS)


def choose(name: str | None, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    """A new backend for one model. `name` None picks the fastest one: "cpu" for float32 on a CPU, else "sdpa".

    May compile the CPU kernels, which takes some seconds once on a machine; without a compiler, "sdpa" is the default.

    Raises:
        UnsupportedFeatureError: no such backend, or it cannot do what the model's layers need.
    """
    for_kernels = device.type == "cpu" and spec.kv_dtype == torch.float32
    if name is None:
        name = CpuBackend.name if for_kernels and get_library() is not None else SdpaBackend.name
    backend = _BACKENDS.get(name)
    if backend is None:
        raise UnsupportedFeatureError(
            f"unknown attention backend {name!r}; available for {device.type} are {', '.join(available())}"
        )
    if backend is CpuBackend and not for_kernels:
        raise UnsupportedFeatureError(
            f'attention backend "cpu" is for float32 on a CPU; {spec.name} has {spec.kv_dtype} on {device}: use "sdpa"'
        )
    if not backend.supports_window and any(layer.window is not None for layer in spec.layers):
        able = sorted(other.name for other in _BACKENDS.values() if other.supports_window)
        raise UnsupportedFeatureError(
            f"attention backend {name!r} has no sliding window, which {spec.name} needs; use one of {', '.join(able)}"
        )
    return backend()
