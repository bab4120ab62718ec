"""What the tests for GPUs need: nothing but torch, transformers, triton, pytest, numpy, psutil and anyio (see README.md)."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("CBENGINE_GPU_DRYRUN") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton loads
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DRY = os.environ.get("CBENGINE_GPU_DRYRUN") == "cpu"
_TESTS = str(Path(__file__).resolve().parents[1])


def _in_the_way() -> bool:
    """Whether somebody's installed package has the name "tests"."""
    try:
        return importlib.util.find_spec("tests.gpu.card") is None
    except ModuleNotFoundError:
        return True


if _in_the_way():
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["tests"].__path__ = [_TESTS]

from tests.gpu.card import Card  # noqa: E402
from tests.support import interpreter  # noqa: E402

if DRY:
    interpreter.mend()


@pytest.fixture(scope="session")
def card() -> Iterator[Card]:
    """The device under test."""
    if DRY:
        with pytest.MonkeyPatch.context() as patch:
            yield Card.dry_run(patch)
        return
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device that this torch can use; CBENGINE_GPU_DRYRUN=cpu runs the tests' code without one")
    torch.cuda.set_device(0)
    yield Card(torch.device("cuda", 0), dry=False)


@pytest.fixture(autouse=True)
def clean(card: Card) -> Iterator[None]:
    """Nothing of one test is left to the next. A device that was lost ends the run: whatever came next would fail too."""
    yield
    try:
        card.settle()
    except RuntimeError as error:
        pytest.exit(f"the device was lost: {error}", returncode=3)
