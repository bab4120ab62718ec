"""Sizes and words that the project keeps to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.source import ROOT, functions, imported_names, parse, python_files, text_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50

# Marks of work that is not done, of tests that do not run, and of one developer's machine. The brackets keep this very
# file from matching.
WORDS = [
    r"\b(TO[D]O|FIX[M]E|XX[X])\b",
    r"\bfor[ ]now\b",
    r"raise NotImplemented[E]rror",
    r"pytest\.(ski[p]|xfai[l])|mark\.(ski[p]|xfai[l])|importor[s]kip",
    r"(^|[\s\"'`(=])/(home|root|Users|work|opt|mnt)/[\w.]",
]

FILES = python_files()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    long = [
        f"{function.name} has {lines} lines"
        for function in functions(parse(path))
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("path", text_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_words(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) for word in WORDS if re.search(word, line)]
    assert found == []


def test_the_words_are_found_where_they_are() -> None:
    samples = [
        "# TO" + "DO: later",
        "cached for" + " now",
        "pytest.sk" + "ip()",
        "see /ho" + "me/me/x",
        'open("/op' + 't/x")',
    ]
    for sample in samples:
        assert any(re.search(word, sample) for word in WORDS), sample
    assert not any(re.search(word, "https://example.org/home/x or {ROOT}/opt/y") for word in WORDS)


@pytest.mark.parametrize("path", python_files("cbengine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_annotations_are_not_evaluated(path: Path) -> None:
    tree = parse(path)
    if any(functions(tree)) and path.name != "__init__.py":
        assert any(name.dotted == "__future__.annotations" for name in imported_names(tree))
