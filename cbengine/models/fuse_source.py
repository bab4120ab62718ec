"""Is a module of a transformers model one whose arithmetic we know? Told by the code that it runs.

transformers repeats the same few pieces of code under many names: the layers of several dozen architectures are Llama's,
word for word. So a class is known if its `forward` is, up to the architecture's name, that of one of the classes below in
the transformers that is installed. Names alone would not do: a class may be derived from a known one, or come with a
checkpoint.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from types import ModuleType
from typing import Any

from torch import nn

_MODELS = "transformers.models."

# Kind of part: the classes that stand for it, as (architecture, class). Functions are named by the architecture alone.
KNOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "attention": (
        ("llama", "LlamaAttention"),
        ("qwen2", "Qwen2Attention"),
        ("mistral", "MistralAttention"),
        ("qwen3", "Qwen3Attention"),
        ("gemma2", "Gemma2Attention"),
        ("gemma3", "Gemma3Attention"),
        ("phi3", "Phi3Attention"),
        ("olmo", "OlmoAttention"),
        ("olmo2", "Olmo2Attention"),
        ("olmo3", "Olmo3Attention"),
    ),
    "rope": (("llama", ""), ("phi3", ""), ("olmo", ""), ("olmo2", "")),
    "mlp": (("llama", "LlamaMLP"), ("phi3", "Phi3MLP")),
    "rms_norm": (("llama", "LlamaRMSNorm"), ("olmo2", "Olmo2RMSNorm")),
    "shifted_rms_norm": (("gemma3", "Gemma3RMSNorm"), ("gemma2", "Gemma2RMSNorm")),
    "plain_layer_norm": (("olmo", "OlmoLayerNorm"),),
    "embedding": (("gemma3", "Gemma3TextScaledWordEmbedding"), ("gemma2", "Gemma2TextScaledWordEmbedding")),
    # norm, attention, add, norm, mlp, add
    "layer": (("llama", "LlamaDecoderLayer"), ("phi3", "Phi3DecoderLayer"), ("mistral", "MistralDecoderLayer")),
    # … with a norm in front of each addition too
    "layer_of_four_norms": (("gemma3", "Gemma3DecoderLayer"), ("gemma2", "Gemma2DecoderLayer")),
    # … with norms only there
    "layer_of_late_norms": (("olmo2", "Olmo2DecoderLayer"), ("olmo3", "Olmo3DecoderLayer")),
    "model": (
        ("llama", "LlamaModel"),
        ("mistral", "MistralModel"),
        ("qwen2", "Qwen2Model"),
        ("qwen3", "Qwen3Model"),
        ("gemma2", "Gemma2Model"),
        ("phi3", "Phi3Model"),
        ("olmo", "OlmoModel"),
        ("olmo2", "Olmo2Model"),
    ),
    # … whose rotary embedding differs from one type of layer to the other
    "model_of_two_ropes": (("gemma3", "Gemma3TextModel"),),
    "causal_lm": (("llama", "LlamaForCausalLM"),),
    "capped_causal_lm": (("gemma2", "Gemma2ForCausalLM"), ("gemma3", "Gemma3ForCausalLM")),
}


def is_known(module: nn.Module, kind: str) -> bool:
    """Whether a module's `forward` is that of a class of this kind, and nobody has changed this module's behaviour."""
    return _untouched(module) and _class_is_known(type(module), kind)


def has_known_rope(attention: nn.Module) -> bool:
    """Whether the rotary embedding that an attention module's code calls is the usual one."""
    found = _rope_of(sys.modules.get(type(attention).__module__))
    return found is not None and any(found == _rope_of(_import(name)) for name, _ in KNOWN["rope"])


def source_of(module: nn.Module) -> str:
    """The code of a module's `forward`; "" if there is none to be had."""
    return _forward_of(type(module)) or ""


def _untouched(module: nn.Module) -> bool:
    """No hooks, and no `forward` of its own in place of its class's."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


@functools.cache
def _class_is_known(cls: type, kind: str) -> bool:
    source = _forward_of(cls)
    return source is not None and any(source == _template(*known) for known in KNOWN[kind])


@functools.cache
def _template(architecture: str, name: str) -> str | None:
    cls = getattr(_import(architecture), name, None)
    return _forward_of(cls) if isinstance(cls, type) else None


@functools.cache
def _import(architecture: str) -> ModuleType | None:
    """None if this transformers has no such architecture."""
    try:
        return importlib.import_module(f"{_MODELS}{architecture}.modeling_{architecture}")
    except ImportError:
        return None


@functools.cache
def _forward_of(cls: type) -> str | None:
    """Canonical code of a class's own `forward`, without the name of its architecture; None if it has none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    for item in body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            return _canonical(item).replace(_prefix(cls.__name__), "")
    return None


@functools.cache
def _rope_of(module: ModuleType | None) -> str | None:
    try:
        names = ("rotate_half", "apply_rotary_pos_emb")
        functions = [inspect.unwrap(getattr(module, name)) for name in names]
        trees = [ast.parse(textwrap.dedent(inspect.getsource(function))).body[0] for function in functions]
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None
    return "\n".join(_canonical(tree) for tree in trees if isinstance(tree, ast.FunctionDef))


_SUFFIXES = (
    "TextScaledWordEmbedding",
    "DecoderLayer",
    "Attention",
    "MLP",
    "RMSNorm",
    "ForCausalLM",
    "TextModel",
    "Model",
)


def _prefix(name: str) -> str:
    """The architecture's name at the beginning of a class's."""
    for suffix in (
        "TextScaledWordEmbedding",
        "DecoderLayer",
        "Attention",
        "MLP",
        "RMSNorm",
        "ForCausalLM",
        "TextModel",
        "Model",
    ):
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return name


def _canonical(function: ast.FunctionDef) -> str:
    """A function's code without decorators, annotations and docstring, in one spelling."""
    function.decorator_list, function.returns = [], None
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return ast.unparse(_DropAnnotations().visit(function))


class _DropAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return ast.Pass()
        return ast.copy_location(ast.Assign([node.target], node.value), node)
