"""The project's own files, parsed: what the tests beside this one look at."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = ("cbengine", "tests", "examples", "benchmarks", "docs", ".ci")
SUFFIXES = {".py", ".sh", ".md", ".toml", ".cpp", ".h", ""}


def text_files() -> list[Path]:
    """Every text file that belongs to the project."""
    files = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in files if path.suffix in SUFFIXES)


def python_files(*folders: str) -> list[Path]:
    """Every Python file of the project, or of some of its top folders."""
    files = [path for path in text_files() if path.suffix == ".py"]
    return [path for path in files if not folders or path.relative_to(ROOT).parts[0] in folders]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@dataclass(frozen=True, slots=True)
class Name:
    """A dotted name that a file uses, and where."""

    dotted: str
    line: int


def imported_names(tree: ast.AST, *, annotations: bool = True) -> Iterator[Name]:
    """Everything that is imported anywhere in the tree: "a.b" for `from a import b`.

    `annotations=False` leaves out what only a type checker imports.
    """
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if not annotations and isinstance(node, ast.If) and _dotted(node.test) in _TYPE_CHECKING:
            skipped.update(child for statement in node.body for child in ast.walk(statement))
        if isinstance(node, ast.Import):
            yield from (Name(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield from (Name(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            yield from (Name(str(a.value), node.lineno) for a in node.args if isinstance(a, ast.Constant))


_TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "find_spec", "__import__")


def used_names(tree: ast.AST) -> Iterator[Name]:
    """The imported names, and every attribute chain that starts at a plain name: "torch.cuda.synchronize"."""
    yield from imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            yield Name(dotted, node.lineno)


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
