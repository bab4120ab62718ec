"""Paged attention backends, and the choice between them."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import torch

from cbengine.attention.base import AttentionBackend, LayerKV
from cbengine.attention.settings import AttentionSettings, page_size_shortcoming
from cbengine.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from cbengine.models.base import ModelSpec

__all__ = ["AttentionBackend", "AttentionSettings", "LayerKV", "available", "choose"]

logger = logging.getLogger("cbengine")

# Imported when they are looked at: some need packages that are not everywhere.
_BACKENDS = {
    "cpu": ("cbengine.attention.cpu", "CpuBackend"),
    "eager": ("cbengine.attention.eager", "EagerBackend"),
    "flash2": ("cbengine.attention.flash", "Flash2Backend"),
    "flash3": ("cbengine.attention.flash", "Flash3Backend"),
    "sdpa": ("cbengine.attention.sdpa", "SdpaBackend"),
    "torch": ("cbengine.attention.torch_native", "TorchBackend"),
    "triton": ("cbengine.attention.triton", "TritonBackend"),
}
_FLASH = ("flash3", "flash2")
_PREFERRED = {"cpu": ("cpu", "sdpa"), "cuda": (*_FLASH, "torch", "triton", "sdpa")}
"""By type of device, the fastest first. "sdpa" serves every model anywhere."""


def available() -> list[str]:
    """Names that `choose` accepts, sorted."""
    return sorted(_BACKENDS)


def choose(wanted: AttentionSettings | str | None, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    """A new backend for one attention type of a model: the one that is named, or else the fastest that can serve it.

    One that the automatic choice passes over is logged, with the reason. May compile the CPU kernels, which takes some
    seconds once on a machine.

    Raises:
        UnsupportedFeatureError: no backend of that name, or it cannot serve this model here with these settings.
    """
    settings = wanted if isinstance(wanted, AttentionSettings) else AttentionSettings(wanted)
    name = settings.backend
    if name is not None:
        return _named(name, settings, device, spec)
    for name in _PREFERRED.get(device.type, ("sdpa",)):
        if name in _FLASH and not settings.auto_switch_to_flash:
            continue
        reasons = _reasons_against(name, settings, device, spec)
        if not reasons:
            logger.info("%s: attention backend %r", spec.name, name)
            return _create(name, settings)
        logger.info("%s: not attention backend %r, which %s", spec.name, name, "; ".join(reasons))
    raise AssertionError("sdpa serves everything")


def _named(name: str, settings: AttentionSettings, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    if name not in _BACKENDS:
        raise UnsupportedFeatureError(
            f"unknown attention backend {settings.name!r}; there are {', '.join(available())}; without "
            "attention_backend the fastest that can serve the model is used"
        )
    reasons = _reasons_against(name, settings, device, spec)
    if reasons:
        able = [other for other in available() if not _reasons_against(other, settings, device, spec)]
        raise UnsupportedFeatureError(
            f"attention backend {name!r} cannot serve {spec.name} on {device}: it {'; it '.join(reasons)}; use one of "
            f"{', '.join(able)}, or leave attention_backend out"
        )
    return _create(name, settings)


def _create(name: str, settings: AttentionSettings) -> AttentionBackend:
    backend = _load(name)
    if settings.max_blocks_per_request and not backend.decode_fast_path:
        logger.warning(
            "max_blocks_per_request=%d changes nothing: attention backend %r has no fast path for decoding",
            settings.max_blocks_per_request,
            name,
        )
    return backend.create(settings)


def _load(name: str) -> type[AttentionBackend]:
    module, kind = _BACKENDS[name]
    return getattr(importlib.import_module(module), kind)


def _reasons_against(name: str, settings: AttentionSettings, device: torch.device, spec: ModelSpec) -> list[str]:
    """Why the backend cannot serve the model there, or nothing."""
    try:
        backend = _load(name)
    except ImportError as error:
        return [f"needs the package {error.name}, which cannot be imported ({error})"]
    reasons = backend.shortcomings(spec, device)
    page_size = page_size_shortcoming(settings.page_size, backend)
    if page_size is not None:
        reasons.append(f"{page_size}: leave page_size out to have it fit")
    missing = None if reasons else backend.unavailable(device)
    return reasons if missing is None else [missing]
