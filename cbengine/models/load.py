"""From a name, a folder, a GGUF file or a built model to something that the engine can run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cbengine.attention import choose
from cbengine.attention.settings import AttentionSettings
from cbengine.errors import InvalidRequestError, UnsupportedFeatureError
from cbengine.models.adapter import TransformersRunner
from cbengine.models.base import ModelSpec
from cbengine.models.gguf import is_gguf, load_gguf
from cbengine.models.spec import spec_from_config

_log = logging.getLogger(__name__)

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "token")
"""Options of `from_pretrained` that say where files are: config and tokenizer need them too."""


@dataclass(slots=True)
class LoadedModel:
    """A model that is ready to be bound, with the tokenizer that came with it."""

    runner: TransformersRunner
    tokenizer: Any | None
    """The transformers tokenizer; None where the source has none, or none was asked for."""
    name: str


def load(
    model: str | Path | PreTrainedModel,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: AttentionSettings | str | None = None,
    quantization: str | None = None,
    with_tokenizer: bool = True,
    **from_pretrained: Any,
) -> LoadedModel:
    """Load a model for serving. Blocks, for minutes when it has to be downloaded; any thread.

    Args:
        model: a hub id, a local folder, the path of a `.gguf` file, or a built transformers model, which is used as it is.
        dtype: dtype of the weights, or its name, or "auto" for the checkpoint's. Default: float32 on a CPU, else "auto";
            a quantised checkpoint is loaded as transformers loads it.
        device: where to put the model. Ignored if `device_map` is among the further options.
        revision, trust_remote_code: as in transformers.
        attention: name of the attention backend (`cbengine.attention.available()`), or all settings about it; default: the
            fastest that can serve the model on the device.
        quantization: as in `EngineConfig`.
        with_tokenizer: False leaves the tokenizer out.
        from_pretrained: further options for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        UnsupportedFeatureError: the model cannot be served, or a package that its format needs is missing.
        InvalidRequestError: options that contradict a built model.
        OSError, ValueError: from transformers, as they are: no such model, no network, a broken checkpoint.
    """
    device = torch.device(device)
    if isinstance(model, PreTrainedModel):
        options = {"revision": revision, **from_pretrained}
        return _adopt(model, dtype, device, attention, quantization, with_tokenizer, options)
    if not isinstance(model, (str, Path)):
        raise InvalidRequestError(
            f"a model is a hub id, a folder, a .gguf file or a transformers PreTrainedModel, got {type(model).__name__}"
        )
    source = str(Path(model).expanduser()) if isinstance(model, Path) or model.startswith("~") else model
    if is_gguf(source):
        network, tokenizer = load_gguf(Path(source), _dtype(dtype, device, False), with_tokenizer, from_pretrained)
    else:
        where = {"revision": revision, "trust_remote_code": trust_remote_code}
        network, tokenizer = _load_checkpoint(source, dtype, device, with_tokenizer, where, from_pretrained)
    if network.device.type != device.type and "device_map" not in from_pretrained:
        network.to(device)  # type: ignore[arg-type]
    runner = TransformersRunner(network, name=source, attention=attention, quantization=quantization, owned=True)
    return LoadedModel(runner, tokenizer, source)


def inspect(
    model: str | Path | PreTrainedModel,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: AttentionSettings | None = None,
    **from_pretrained: Any,
) -> ModelSpec:
    """The spec of a model by its config, its weights sized on the meta device. Arguments and errors as for `load`.

    Raises:
        UnsupportedFeatureError: also for a GGUF file, which has to be read to be known, and if `attention` (None: not looked
            at) names a backend that cannot serve the model.
    """
    if isinstance(model, PreTrainedModel):
        return TransformersRunner(model, attention=attention).spec
    source = str(Path(model).expanduser()) if isinstance(model, Path) or model.startswith("~") else model
    if is_gguf(source):
        raise UnsupportedFeatureError(f"{source}: a GGUF file is not planned for without loading it; start an engine")
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    hub = {key: from_pretrained[key] for key in _HUB_OPTIONS if key in from_pretrained}
    config = from_pretrained.get("config") or AutoConfig.from_pretrained(source, **where, **hub)
    spec_from_config(config, name=source, kv_dtype=torch.float32)  # refuses what is not served
    wanted = _dtype(dtype, torch.device(device), False)
    stored = getattr(config, "dtype", None)
    kind = wanted if isinstance(wanted, torch.dtype) else stored if isinstance(stored, torch.dtype) else torch.float32
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)
    network.tie_weights()
    tensors = {id(t): t for t in (*network.parameters(), *network.buffers())}
    weight_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    spec = spec_from_config(config, name=source, kv_dtype=kind, weight_bytes=weight_bytes)
    if attention is not None:
        choose(attention, torch.device(device), spec)
    return spec


def _load_checkpoint(
    source: str,
    dtype: str | torch.dtype | None,
    device: torch.device,
    with_tokenizer: bool,
    where: dict[str, Any],
    options: dict[str, Any],
) -> tuple[PreTrainedModel, Any | None]:
    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    # The config first: a model that cannot be served is refused before gigabytes of weights are fetched.
    config = options.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(source, **where, **hub)
    spec_from_config(config, name=source, kv_dtype=torch.float32)
    quantised = getattr(config, "quantization_config", None) is not None or "quantization_config" in options
    if device.type != "cpu" and "device_map" not in options and find_spec("accelerate") is not None:
        # Shard by shard to where it is wanted, and never whole in RAM.
        options = {**options, "device_map": {"": device}}
    try:
        network = AutoModelForCausalLM.from_pretrained(
            source, dtype=_dtype(dtype, device, quantised), **where, **options
        )
    except SafetensorError as error:  # derived from nothing but Exception
        raise OSError(f"{source}: a file of its weights is broken or not complete ({error}); fetch it again") from error
    tokenizer = None
    if with_tokenizer and _may_have_tokenizer(source, hub):
        tokenizer = _load_tokenizer(source, **where, **hub)
    return network, tokenizer


def _load_tokenizer(source: str, **options: Any) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # what the Rust library raises is an Exception and nothing more
        raise OSError(
            f"{source}: its tokenizer cannot be read ({error}); fetch it again, or pass `tokenizer=`"
        ) from error


def _adopt(
    model: PreTrainedModel,
    dtype: str | torch.dtype | None,
    device: torch.device,
    attention: AttentionSettings | str | None,
    quantization: str | None,
    with_tokenizer: bool,
    options: dict[str, Any],
) -> LoadedModel:
    """Use a model of the caller's as it is."""
    given = sorted(key for key, value in options.items() if value is not None)
    if given:
        raise InvalidRequestError(f"{', '.join(given)}: not for a model that is already built; load it with them")
    wanted = _dtype(dtype, device, True) if dtype is not None else "auto"
    if wanted not in ("auto", model.dtype):
        raise InvalidRequestError(
            f"dtype={dtype!r} does not fit the model that was passed, which is {model.dtype}; leave dtype out, or convert it"
        )
    if model.device.type != device.type or device.index not in (None, model.device.index):
        raise InvalidRequestError(
            f"device={str(device)!r} does not fit the model that was passed, which is on {model.device}; move it first"
        )
    runner = TransformersRunner(model, attention=attention, quantization=quantization)
    tokenizer = None
    source = str(getattr(model.config, "_name_or_path", "") or "")
    if with_tokenizer and source and not is_gguf(source) and _may_have_tokenizer(source, {}):
        try:
            tokenizer = _load_tokenizer(source)
        except (OSError, ValueError) as error:
            # The name is only a hint: the model may have been made anywhere.
            _log.warning("no tokenizer found for %s (%s); pass one, or use token ids", source, error)
    return LoadedModel(runner, tokenizer, runner.spec.name)


def _dtype(dtype: str | torch.dtype | None, device: torch.device, quantised: bool) -> str | torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" and not quantised else "auto"
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidRequestError(f'dtype must be "auto" or a floating point dtype such as "bfloat16", got {dtype!r}')
    return found


def _may_have_tokenizer(source: str, hub: dict[str, Any]) -> bool:
    """False for a local folder without any file of a tokenizer: that is a model for token ids, and no error."""
    folder = Path(source, hub.get("subfolder") or "")
    if not folder.is_dir():
        return True
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*")) or any(folder.glob("*.model"))
