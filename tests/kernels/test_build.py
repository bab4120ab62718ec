"""The compiled kernels: made once for a machine, and done without where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbengine.kernels import build


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_process_finds_the_same_library() -> None:
    script = "from cbengine.kernels.build import find_or_build; print(find_or_build())"
    found = {run(script, PYTHONHASHSEED=seed) for seed in ("0", "1", "2")}
    assert len(found) == 1 and Path(found.pop()).is_file()


def test_two_at_once_leave_one_whole_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "kernels" / "library.so"
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    script = f"""
import pathlib
from cbengine.kernels import build
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


def test_without_a_compiler_everything_runs(tmp_path: Path) -> None:
    script = """
import asyncio, logging, warnings
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=__import__("sys").stdout)
from cbengine import AsyncEngine
from tests.models.tiny import tiny

async def main():
    async with AsyncEngine(tiny("llama"), page_size=4, num_blocks=32) as engine:
        answer = await engine.generate([5, 6, 7], max_new_tokens=4, temperature=0, ignore_eos=True)
        print("TOKENS", answer.token_ids)

asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    environment = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(root)}
    without = run(script, **environment).splitlines()
    assert sum("compiler" in line for line in without) == 1
    with_kernels = run(script, PYTHONPATH=str(root)).splitlines()
    tokens = [line for line in without + with_kernels if line.startswith("TOKENS")]
    assert len(tokens) == 2 and tokens[0] == tokens[1]
