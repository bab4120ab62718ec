"""Models as the engine sees them. `load` and `adapter` import transformers; nothing here does."""

from __future__ import annotations

from cbengine.models.base import LayerSpec, ModelRunner, ModelSpec

__all__ = ["LayerSpec", "ModelRunner", "ModelSpec"]
