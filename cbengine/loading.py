"""From what the user named to what the engine runs: a model runner and a tokenizer. Engine thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbengine.config import EngineConfig
from cbengine.execution.worker import Loaded
from cbengine.models.base import ModelSpec
from cbengine.text.base import Tokenizer


@dataclass(slots=True)
class Source:
    """What an engine serves: as the user named it, and loaded once somebody has started it."""

    model: Any
    config: EngineConfig
    tokenizer: Any
    options: Mapping[str, Any]
    loaded: Loaded | None = None

    def load(self) -> Loaded:
        """On the engine thread: load it, the first time."""
        if self.loaded is None:
            self.loaded = load(self.model, self.config, self.tokenizer, self.options)
        return self.loaded

    def forget(self) -> None:
        """Give the loaded model back."""
        self.loaded = None


def load(model: Any, config: EngineConfig, tokenizer: Any, options: Mapping[str, Any]) -> Loaded:
    """Load `model` (see `AsyncEngine`). A given `tokenizer` replaces the model's own."""
    if hasattr(model, "bind") and hasattr(model, "spec"):  # a ModelRunner
        found = getattr(model, "tokenizer", None)
        return Loaded(model, _wrap(tokenizer if tokenizer is not None else found))
    # Late: transformers' model code takes seconds to import, and an engine over a FakeModel has no need of it.
    from cbengine.models.load import load as load_model

    loaded = load_model(
        model,
        dtype=config.dtype,
        device=config.device or "cpu",
        attention=config.attention_backend,
        with_tokenizer=tokenizer is None,
        **dict(options),
    )
    return Loaded(loaded.runner, _wrap(tokenizer if tokenizer is not None else loaded.tokenizer))


def inspect(model: Any, config: EngineConfig, options: Mapping[str, Any]) -> ModelSpec:
    """What is to be known of `model` for a memory plan, without loading its weights. Blocks (files, the hub)."""
    if hasattr(model, "bind") and hasattr(model, "spec"):  # a ModelRunner
        return model.spec
    from cbengine.models.load import inspect as inspect_model

    return inspect_model(model, dtype=config.dtype, device=config.device or "cpu", **dict(options))


def _wrap(tokenizer: Any) -> Tokenizer | None:
    if tokenizer is None or hasattr(tokenizer, "detokenizer"):
        return tokenizer
    from cbengine.text.tokenize import TextTokenizer

    return TextTokenizer(tokenizer)
