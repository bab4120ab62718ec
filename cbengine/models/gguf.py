"""Models in GGUF files: read by transformers and unpacked to plain weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from cbengine.errors import InvalidRequestError, UnsupportedFeatureError
from cbengine.models.spec import spec_from_config, text_config

_PACKAGES = ("gguf", "accelerate")


def is_gguf(source: str) -> bool:
    """True if `source` names a GGUF file."""
    return source.lower().endswith(".gguf")


def load_gguf(
    path: Path, dtype: str | torch.dtype, with_tokenizer: bool, options: dict[str, Any]
) -> tuple[PreTrainedModel, Any | None]:
    """The model of a GGUF file, its weights dequantised to `dtype`, and its tokenizer.

    Puts right two things that transformers gets wrong with such files: constants that went through float32 (an
    rms_norm_eps of 9.999999747378752e-06), and pre-tokenizers that lose their rule for digits.

    Raises:
        FileNotFoundError: no such file.
        UnsupportedFeatureError: packages are missing, or the model cannot be served.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise UnsupportedFeatureError(
            f"reading a GGUF file needs the packages {' and '.join(missing)}: pip install 'cbengine[gguf]'"
        )
    if "config" in options or "quantization_config" in options:
        raise InvalidRequestError("config and quantization_config cannot be given for a GGUF file, which holds its own")
    folder, file = str(path.parent), path.name
    config = AutoConfig.from_pretrained(folder, gguf_file=file)
    text = text_config(config, str(path))
    for field in ("rms_norm_eps", "layer_norm_eps"):
        if getattr(text, field, None) is not None:
            setattr(text, field, undo_float32(getattr(text, field)))
    spec_from_config(config, name=str(path), kv_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        config=config,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        **options,
    )
    tokenizer = None
    if with_tokenizer:
        from cbengine.text.tokenize import fix_gguf_tokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        fix_gguf_tokenizer(tokenizer, path)
    return model, tokenizer


def undo_float32(value: float) -> float:
    """The shortest decimal that has the same float32: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))
