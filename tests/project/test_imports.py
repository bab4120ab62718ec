"""Which part of cbengine may import what (the rooms of docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.project.source import ROOT, imported_names, parse, python_files, used_names

PACKAGE = ROOT / "cbengine"

# Third-party names, and the only places that may name them. A place is a file or a folder of cbengine.
ONLY_IN: dict[str, tuple[str, ...]] = {
    r"torch\.cuda(\.|$)": ("devices/cuda.py",),
    r"flash_attn(_\w+)?(\.|$)": ("attention/flash.py",),
    # Model classes, not tokenizers or configs: AutoModel…, LlamaForCausalLM, PreTrainedModel, modeling_utils, …
    r"transformers\.(.*\.)?(AutoModel\w*|\w+ForCausalLM|\w*PreTrainedModel|modeling_\w+|models(\.|$))": ("models",),
    r"(asyncio|anyio|trio|uvloop|sniffio)(\.|$)": ("bridge", "engine.py", "batching.py", "stream.py", "cli"),
    r"rich(\.|$)": ("cli",),
    r"llguidance(\.|$)": ("text/structured.py", "text/grammar_tokens.py", "prompts.py"),
}

VALUES = ("errors", "outputs", "sampling")
"""Plain values, which import nothing but each other."""

# For each room, the rooms it may import besides itself and the plain values. What is not listed may import anything.
VALUE_MODULES = ("text.structured_spec", "text.parts")
"""Values that live in another room."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "outputs": (),
    "sampling": (),
    "config": (),
    "devices": ("config", "threads"),
    "text": (),
    "observe": (),
    "cache": ("config", "devices.base", "models.base"),
    "scheduling": ("config", "cache", "models.base"),
    "kernels": ("cache.geometry", "execution.inputs", "threads"),
    "threads": (),
    "models": ("config", "attention", "kernels", "cache.geometry", "execution.inputs", "text"),
    "attention": ("config", "kernels", "cache.geometry", "execution.inputs", "models.base"),
    "bridge": ("scheduling.request", "scheduling.edit"),
    "execution": (
        "config",
        "cache",
        "scheduling",
        "devices",
        "kernels",
        "models.base",
        "text",
        "bridge",
        "observe",
    ),
    "stream": ("bridge", "text"),
}

# Nothing below the API knows the API, and nothing at all knows the command line.
UPPER = {"engine", "asking", "batching", "choices", "prompts", "stream", "blocking", "serve"}
MAY_IMPORT_UPPER = UPPER | {"__init__", "cli", "testing"}

FILES = python_files("cbengine")


def room_of(path: Path) -> str:
    """The first part of a module's place: "scheduling" for scheduling/fifo.py, "engine" for engine.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def violations_of_names(path: Path, tree: ast.AST) -> list[str]:
    """Names in one file that only other places may use."""
    place = path.relative_to(PACKAGE)
    found = []
    for pattern, allowed in ONLY_IN.items():
        if str(place) in allowed or place.parts[0] in allowed:
            continue
        found += [f"{place}:{n.line}: {n.dotted}" for n in used_names(tree) if re.match(pattern, n.dotted)]
    return found


def violations_of_rooms(path: Path, tree: ast.AST) -> list[str]:
    """Imports between rooms of cbengine that go the wrong way. What annotations alone need is free."""
    room, found = room_of(path), []
    for name in imported_names(tree, annotations=False):
        package, _, target = name.dotted.partition(".")
        if package != "cbengine" or not target:
            continue
        other = target.split(".")[0]
        if other == room or (other in VALUES and room not in VALUES):
            continue
        if not may_import(room, target):
            found.append(f"{path.relative_to(PACKAGE)}:{name.line}: {room} imports {name.dotted}")
    return found


def may_import(room: str, target: str) -> bool:
    """Whether `room` may import `target`, a module path below cbengine."""
    other = target.split(".")[0]
    if other == "cli" or (other in UPPER and room not in MAY_IMPORT_UPPER):
        return False
    if room in VALUES:
        return other in VALUES or target.startswith(VALUE_MODULES)
    allowed = MAY_IMPORT.get(room)
    return allowed is None or any(target == place or target.startswith(place + ".") for place in allowed)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports(path: Path) -> None:
    tree = parse(path)
    assert violations_of_names(path, tree) + violations_of_rooms(path, tree) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("scheduling/x.py", "import torch; torch.cuda.synchronize()"),
        ("scheduling/x.py", "from torch import cuda"),
        ("cache/x.py", "import asyncio"),
        ("execution/x.py", "def f():\n    from anyio import sleep"),
        ("attention/x.py", "import importlib\nimportlib.util.find_spec('flash_attn')"),
        ("engine.py", "from transformers import AutoModelForCausalLM"),
        ("text/x.py", "from transformers.models.llama import LlamaConfig"),
        ("cache/x.py", "from cbengine.scheduling import fifo"),
        ("cache/x.py", "if True:\n    from cbengine.scheduling import fifo"),
        ("cache/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio"),
        ("scheduling/x.py", "import cbengine.execution.loop"),
        ("bridge/x.py", "from cbengine.execution.loop import StepLoop"),
        ("devices/x.py", "from cbengine.cache.pool import CachePool"),
        ("models/x.py", "from cbengine.execution.loop import StepLoop"),
        ("execution/x.py", "from cbengine.engine import AsyncEngine"),
        ("errors.py", "from cbengine.config import EngineConfig"),
        ("engine.py", "from cbengine.cli import main"),
    ],
)
def test_a_forbidden_import_is_found(place: str, line: str) -> None:
    tree, path = ast.parse(line), PACKAGE / place
    assert len(violations_of_names(path, tree) + violations_of_rooms(path, tree)) >= 1


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("scheduling/x.py", "import torch; torch.tensor([1])"),
        ("scheduling/x.py", "from cbengine.errors import QueueFullError"),
        ("scheduling/x.py", "from cbengine.cache.manager import CacheManager"),
        ("text/x.py", "from transformers import AutoTokenizer, PreTrainedTokenizerBase"),
        ("models/x.py", "from transformers import AutoModelForCausalLM"),
        ("models/x.py", "from cbengine.execution.inputs import StepInputs"),
        ("bridge/x.py", "import asyncio, anyio"),
        ("cache/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cbengine.scheduling import fifo"),
        ("outputs.py", "from cbengine.errors import CBEngineError"),
    ],
)
def test_an_allowed_import_is_not_found(place: str, line: str) -> None:
    tree, path = ast.parse(line), PACKAGE / place
    assert violations_of_names(path, tree) + violations_of_rooms(path, tree) == []
