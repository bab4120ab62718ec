"""Paged attention backends, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbengine.attention.base import AttentionBackend, LayerKV
from cbengine.attention.eager import EagerBackend
from cbengine.attention.sdpa import SdpaBackend
from cbengine.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import torch

    from cbengine.models.base import ModelSpec

__all__ = ["AttentionBackend", "LayerKV", "available", "choose"]

_BACKENDS: dict[str, type[AttentionBackend]] = {backend.name: backend for backend in (EagerBackend, SdpaBackend)}


def available() -> list[str]:
    """Names that `choose` accepts, sorted."""
    return sorted(_BACKENDS)


def choose(name: str | None, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    """A new backend for one model. `name` None picks the fastest one for the device: "sdpa".

    Raises:
        UnsupportedFeatureError: no such backend, or it cannot do what the model's layers need.
    """
    if name is None:
        name = SdpaBackend.name
    backend = _BACKENDS.get(name)
    if backend is None:
        raise UnsupportedFeatureError(
            f"unknown attention backend {name!r}; available for {device.type} are {', '.join(available())}"
        )
    if not backend.supports_window and any(layer.window is not None for layer in spec.layers):
        able = sorted(other.name for other in _BACKENDS.values() if other.supports_window)
        raise UnsupportedFeatureError(
            f"attention backend {name!r} has no sliding window, which {spec.name} needs; use one of {', '.join(able)}"
        )
    return backend()
