"""From what the user named to what the engine runs: a model runner and a tokenizer. Engine thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbengine.attention.settings import AttentionSettings
from cbengine.config import EngineConfig
from cbengine.devices.base import Device
from cbengine.devices.choose import give_back_unused, make_device, resolve
from cbengine.errors import UnsupportedFeatureError
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
            loaded = load(self.model, self.config, self.tokenizer, self.options)
            _prepare_grammars(loaded)
            self.loaded = loaded
        return self.loaded

    def forget(self) -> None:
        """Give the loaded model back."""
        self.loaded = None
        give_back_unused()

    def make_device(self, config: EngineConfig) -> Device:
        """The device that the model is, or will be, on."""
        return make_device(config.merged({"device": device_for(self.model, config)}))


def device_for(model: Any, config: EngineConfig) -> str:
    """`config.device`; by default where a model is that has been built already, or else the best there is.

    Raises:
        UnsupportedFeatureError: there is no such device here, or it is not served.
    """
    wanted = config.device
    if wanted is None and not isinstance(model, (str, Path)):
        wanted = str(getattr(model, "device", "cpu"))
    return str(resolve(wanted))


def load(model: Any, config: EngineConfig, tokenizer: Any, options: Mapping[str, Any]) -> Loaded:
    """Load `model` (see `AsyncEngine`). A given `tokenizer` replaces the model's own."""
    if hasattr(model, "bind") and hasattr(model, "spec"):  # a ModelRunner
        if config.quantization is not None:
            raise UnsupportedFeatureError(
                f"quantization={config.quantization!r} is for transformers models, and {type(model).__name__} is none; "
                "leave it out"
            )
        found = getattr(model, "tokenizer", None)
        return Loaded(model, _wrap(tokenizer if tokenizer is not None else found))
    # Late: transformers' model code takes seconds to import, and an engine over a FakeModel has no need of it.
    from cbengine.models.load import load as load_model

    loaded = load_model(
        model,
        dtype=config.dtype,
        device=device_for(model, config),
        attention=AttentionSettings.of(config),
        quantization=config.quantization,
        with_tokenizer=tokenizer is None,
        **dict(options),
    )
    return Loaded(loaded.runner, _wrap(tokenizer if tokenizer is not None else loaded.tokenizer))


def inspect(model: Any, config: EngineConfig, options: Mapping[str, Any]) -> ModelSpec:
    """What is to be known of `model` for a memory plan, without loading its weights. Blocks (files, the hub)."""
    if hasattr(model, "bind") and hasattr(model, "spec"):  # a ModelRunner
        return model.spec
    from cbengine.models.load import inspect as inspect_model

    attention = AttentionSettings.of(config) if config.attention_backend is not None else None
    device = device_for(model, config)
    return inspect_model(model, dtype=config.dtype, device=device, attention=attention, **dict(options))


def _prepare_grammars(loaded: Loaded) -> None:
    """Have the tokenizer ready for structured output now, when it keeps nobody's tokens waiting."""
    if getattr(loaded.tokenizer, "table", None) is None:
        return  # no grammar can be made for it
    from cbengine.text.structured import prepare_ahead

    prepare_ahead(loaded.tokenizer, loaded.runner.spec.vocab_size, loaded.runner.spec.eos_token_ids)


def check_kinds(config: object, load_options: object, tokenizer: object) -> None:
    """Raises `TypeError` for an argument of `AsyncEngine` of another kind, such as a tokenizer's name for a tokenizer."""
    if config is not None and not isinstance(config, EngineConfig):
        raise TypeError(f"config must be an EngineConfig or None, got {type(config).__name__}")
    if load_options is not None and not isinstance(load_options, Mapping):
        raise TypeError(f"load_options must be a mapping or None, got {type(load_options).__name__}")
    if tokenizer is None or hasattr(tokenizer, "detokenizer"):
        return
    if isinstance(tokenizer, (str, Path)) or not all(hasattr(tokenizer, name) for name in ("encode", "decode")):
        raise TypeError(
            "tokenizer must be a transformers tokenizer, an object with the methods of cbengine.text.base.Tokenizer, or None, "
            f"got {type(tokenizer).__name__} {tokenizer!r:.60}; load one with transformers.AutoTokenizer.from_pretrained"
        )


def _wrap(tokenizer: Any) -> Tokenizer | None:
    if tokenizer is None or hasattr(tokenizer, "detokenizer"):
        return tokenizer
    from cbengine.text.tokenize import TextTokenizer

    return TextTokenizer(tokenizer)
