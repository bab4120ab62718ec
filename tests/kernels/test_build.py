"""The compiled kernels: made once for a machine, and done without where there is no compiler."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbengine import AsyncEngine
from cbengine.kernels import build
from cbengine.kernels.library import get_library
from tests.models.tiny import tiny

IMPORT_BUILD = f"import sys; sys.path.insert(0, {str(Path(build.__file__).parent)!r}); import build; "
"""The module alone, which needs nothing else: to import the package takes seconds."""


def run(script: str, *environments: dict[str, str]) -> list[str]:
    """What the script prints in each of these environments, in processes side by side."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for environment in environments
    ]
    shown: list[str] = []
    for process in processes:
        out, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        shown.append(out.strip())
    return shown


def test_every_process_finds_the_same_library() -> None:
    script = f"{IMPORT_BUILD}print(build.find_or_build())"
    found = set(run(script, *({"PYTHONHASHSEED": seed} for seed in ("1", "2"))))
    assert found == {str(build.find_or_build())} and Path(found.pop()).is_file()


def test_two_at_once_leave_one_whole_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "kernels" / "library.so"
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    script = f"""
{IMPORT_BUILD}
import pathlib
build.SOURCES = pathlib.Path({str(sources)!r})
build.compile_library(build.find_compiler(), pathlib.Path({str(target)!r}), ())
"""
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(timeout=100) for process in processes] == [0, 0]
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    import ctypes

    assert ctypes.CDLL(str(target)).answer() == 42


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.cpp").write_text("this is no C++\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.BuildError, match="error"):
        build.compile_library(build.find_compiler(), tmp_path / "out" / "library.so", ())
    assert not list((tmp_path / "out").iterdir())


def a_short_answer() -> tuple[int, ...]:
    async def main() -> tuple[int, ...]:
        async with AsyncEngine(tiny("llama"), page_size=4, num_blocks=32) as engine:
            answer = await engine.generate([5, 6, 7], max_new_tokens=4, temperature=0, ignore_eos=True)
            return answer.token_ids

    return asyncio.run(main())


def test_without_a_compiler_everything_runs(tmp_path: Path) -> None:
    script = """
import logging, warnings
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=__import__("sys").stdout)
from tests.kernels.test_build import a_short_answer

print("TOKENS", a_short_answer())
"""
    root = Path(__file__).parents[2]
    environment = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(root)}
    without = run(script, environment)[0].splitlines()
    assert sum("compiler" in line for line in without) == 1
    with_kernels = a_short_answer()
    assert get_library() is not None
    assert [line for line in without if line.startswith("TOKENS")] == [f"TOKENS {with_kernels}"]
