"""`import cbengine` changes nothing in the process, and loads no model code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.project.source import ROOT

# Runs in a fresh interpreter. Torch and transformers are imported first, so that what they do is not blamed on us.
SCRIPT = """
import asyncio, gc, json, locale, logging, os, random, signal, sys, threading, warnings
import numpy, torch, transformers

def state():
    return {
        "event loop policy": repr(getattr(asyncio.events, "_event_loop_policy", None)),
        "signal handlers": [repr(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "environment": dict(os.environ),
        "threads": sorted(t.name for t in threading.enumerate()),
        "torch RNG": torch.get_rng_state().tolist(),
        "torch defaults": [str(torch.get_default_dtype()), torch.get_num_threads(), torch.get_num_interop_threads(),
                           torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "numpy RNG": repr(numpy.random.get_state()),
        "random": repr(random.getstate()),
        "switch interval": sys.getswitchinterval(),
        "garbage collector": [gc.isenabled(), *gc.get_threshold(), gc.get_freeze_count()],
        "hooks": [repr(h) for h in (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook)],
        "logging": [repr(logging.root.handlers), logging.root.level, logging.lastResort.level],
        "warning filters": repr(warnings.filters),
        "working folder": os.getcwd(),
        "locale": repr(locale.setlocale(locale.LC_ALL)),
        "recursion limit": sys.getrecursionlimit(),
    }

before, modules = state(), set(sys.modules)
import cbengine
after = state()
changed = {key: [str(before[key]), str(after[key])] for key in before if before[key] != after[key]}
print(json.dumps({"changed": changed, "modules": sorted(set(sys.modules) - modules)}))
"""

OPTIONAL = ("accelerate", "flash_attn", "gguf", "jsonschema", "llguidance", "rich", "trio", "uvloop")


@pytest.fixture(scope="module")
def effects() -> dict[str, Any]:
    """What the import changed, and the modules that came with it."""
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_changes_nothing(effects: dict[str, Any]) -> None:
    assert effects["changed"] == {}


def test_import_loads_no_model_code(effects: dict[str, Any]) -> None:
    modules = effects["modules"]
    assert "cbengine.engine" in modules
    heavy = [m for m in modules if m.startswith("transformers.models.") or m == "transformers.modeling_utils"]
    assert heavy == []


def test_import_loads_nothing_optional(effects: dict[str, Any]) -> None:
    assert [m for m in effects["modules"] if m.split(".")[0] in OPTIONAL] == []


def test_import_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error::DeprecationWarning:cbengine", "-c", "import cbengine"],
                          cwd=ROOT, capture_output=True, text=True, timeout=100)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
