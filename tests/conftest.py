"""Fixtures that every test can use. What they are made of is in `tests/support/`."""

from __future__ import annotations

import os

# Before torch loads, which is what reads them. GOMP_SPINCOUNT: beside a busy event loop, OpenMP threads that spin for
# long take the core that the loop needs. HF_HUB_OFFLINE: tests read local folders only.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before triton loads: without a GPU, kernels that tests call run in its interpreter. (Compiling them takes another process.)
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import interpreter
from tests.support.guard import LoopGuard
from tests.support.leaks import engine_threads, find_leaks
from tests.support.loops import kinds_of, run_test
from tests.support.models import Reference, load_reference, model_folder

interpreter.mend()
# Timings never decide a test, and a failure in CI is one that can be run again.
settings.register_profile("cbengine", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("cbengine")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test marked `aio` once for every loop that it asks for."""
    marker = metafunc.definition.get_closest_marker("aio")
    if marker is None or not inspect.iscoroutinefunction(metafunc.function):
        return
    metafunc.fixturenames.append("loop_kind")
    metafunc.parametrize("loop_kind", kinds_of(marker))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test marked `aio` on the loop that its parameter names."""
    marker = pyfuncitem.get_closest_marker("aio")
    if marker is None or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    options = {name: value for name, value in marker.kwargs.items() if name != "trio"}
    kind = str(pyfuncitem.callspec.params["loop_kind"])
    run_test(kind, functools.partial(pyfuncitem.obj, **arguments), **options)
    return True


@pytest.fixture
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Name of the loop that the test runs on: "asyncio", "uvloop", "eager" or "trio"."""
    return request.param


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """After every test: no thread of ours that was not there before, and every watched engine idle."""
    before = engine_threads()
    yield
    leaks = find_leaks(before)
    assert not leaks, "left over by the test:\n  " + "\n  ".join(leaks)


@pytest.fixture
def loop_guard() -> Iterator[LoopGuard]:
    """Fails the test if a callback used more than 20 ms of the loop's own CPU time (see `tests/support/guard.py`)."""
    with LoopGuard() as guard:
        yield guard
    guard.check()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, float32: a Llama with full attention and a chat template."""
    return model_folder("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, float32: 15 layers with a window of 512 tokens, 3 with full attention."""
    return model_folder("gemma3")


@pytest.fixture(scope="session")
def reference_generate(smollm2: Path) -> Reference:
    """`reference_generate(prompt_ids, n)`: SmolLM2's greedy answer by transformers itself, remembered."""
    return load_reference(smollm2)


@pytest.fixture(scope="session")
def hf_model(reference_generate: Reference) -> Any:
    """The plain transformers model (SmolLM2, float32, CPU) behind `reference_generate`. Not to be changed."""
    return reference_generate.model
