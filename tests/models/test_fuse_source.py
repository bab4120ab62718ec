"""Telling modules by the code that they run."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers.models.llama import modeling_llama

from cbengine.models import fuse_source
from cbengine.models.fuse_source import KNOWN, has_known_rope, is_known, source_of
from tests.models.tiny import tiny

SOURCE = Path(modeling_llama.__file__).read_text(encoding="utf-8")


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a copy of transformers' Llama under another name, changed as asked for, and an attention module of it."""

    def make(name: str, **changes: str) -> Any:
        text = SOURCE.replace("Llama", name)
        text = text.replace("from ...", "from transformers.").replace(
            "from .config", "from transformers.models.llama.config"
        )
        text = text.replace(f"{name}Config", "LlamaConfig")
        for old, new in changes.items():
            assert CHANGES[old] in text
            text = text.replace(CHANGES[old], new)
        path = tmp_path / f"modeling_{name.lower()}.py"
        path.write_text(text, encoding="utf-8")
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)
        exec(compile(text, str(path), "exec"), module.__dict__)
        return getattr(module, f"{name}ForCausalLM")(tiny("llama").config).eval()

    return make


CHANGES = {
    "attention": "scaling=self.scaling,",
    "rope": "return torch.cat((-x2, x1), dim=-1)",
    "comment": "# Fully Connected",
}


def test_a_copy_under_another_name_is_known(renamed: Any) -> None:
    model = renamed("Alpaca", comment="# Something else entirely")
    layer = model.model.layers[0]
    assert is_known(layer.self_attn, "attention") and has_known_rope(layer.self_attn)
    assert is_known(layer, "layer") and is_known(layer.mlp, "mlp") and is_known(layer.input_layernorm, "rms_norm")
    assert is_known(model.model, "model") and is_known(model, "causal_lm")
    assert not is_known(layer, "layer_of_four_norms")


def test_a_copy_that_computes_otherwise_is_not(renamed: Any) -> None:
    attention = renamed("Vicuna", attention="scaling=self.scaling * 2,").model.layers[0].self_attn
    assert not is_known(attention, "attention")
    attention = renamed("Guanaco", rope="return torch.cat((x2, x1), dim=-1)").model.layers[0].self_attn
    assert is_known(attention, "attention") and not has_known_rope(attention)


def test_classes_without_code_are_not_known() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class LlamaMLP(nn.Module):\n    def forward(self, x):\n        return x", namespace)
    module = namespace["LlamaMLP"]()
    assert not is_known(module, "mlp")
    assert source_of(module) == ""


def test_every_class_in_the_list_is_there() -> None:
    """Those that another version of transformers lacks are no error, but a list that names nothing would be."""
    for kind, classes in KNOWN.items():
        if kind != "rope":
            assert any(fuse_source._template(*known) for known in classes), kind
    assert fuse_source._template("no_such_architecture", "NoSuchAttention") is None
