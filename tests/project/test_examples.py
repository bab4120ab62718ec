"""The examples run, and README shows what they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.project.source import ROOT

EXAMPLES = ROOT / "examples"


def run(*command: str, **environment: str) -> str:
    """Run a program of the examples' folder; its standard output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shown(smollm2: Path) -> dict[str, str]:
    """What the examples with a model show. Side by side: most of their time goes to imports, which use one core."""
    questions = ("What is the capital of France?", "Say hello.")
    with ThreadPoolExecutor() as pool:
        hello = pool.submit(run, "hello.py", str(smollm2))
        quickstart = pool.submit(run, "quickstart.py", *questions, CBENGINE_MODELS=str(smollm2.parent))
        return {"hello": hello.result(), "quickstart": quickstart.result()}


def test_hello_streams_a_model(shown: dict[str, str]) -> None:
    assert "Paris" in shown["hello"]


def test_quickstart_answers_every_prompt(shown: dict[str, str]) -> None:
    assert "Paris" in shown["quickstart"]
    assert len(re.findall(r"^\[[12]\] \((stop|length), \d+ tokens", shown["quickstart"], re.MULTILINE)) == 2


def test_models_that_are_there_are_left_alone(smollm2: Path) -> None:
    before = (smollm2 / "config.json").stat().st_mtime_ns
    assert run("get_models.py", "--out", str(smollm2.parent), "smollm2") == f"{smollm2}\n"
    assert (smollm2 / "config.json").stat().st_mtime_ns == before


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown model gpt; known are smollm2, gemma3"):
        run("get_models.py", "--out", str(tmp_path), "gpt")


def test_the_program_in_the_readme_is_a_program() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    compile(code, "README.md", "exec")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("text", ["README.md", "docs/architecture.md"])
def test_files_that_documents_name_are_there(text: str) -> None:
    words = re.findall(r"[\w./-]+/[\w./-]+\.(?:py|sh|md)\b", (ROOT / text).read_text(encoding="utf-8"))
    assert words
    promised = {"devices/cuda.py", "attention/flash.py"}  # named in rules for when they come
    missing = [word for word in words if not any((ROOT / base / word).exists() for base in ("", "cbengine"))]
    assert set(missing) <= promised
